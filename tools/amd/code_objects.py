"""Takes the GPU code objects out of a library that hipcc or clang built.

    python tools/amd/code_objects.py LIBRARY DIRECTORY

writes DIRECTORY/STEM.N.ARCH.co and prints their names, so that what is disassembled and run in
tests/cdna_sim is the machine code that ships. N counts the translation units: each brings a bundle
of its own. The format is clang's offload bundle ("ClangOffloadBundler" in LLVM's documentation).
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

MAGIC, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"


def bundles(data: bytes) -> list[dict[str, bytes]]:
    """The bundles in a file, in order: target such as "gfx942" -> ELF code object."""
    found = []
    at = data.find(MAGIC)
    while at >= 0:
        (count,) = struct.unpack_from("<Q", data, at + len(MAGIC))
        entry = at + len(MAGIC) + 8
        objects = {}
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, entry)
            kind, _, target = (
                data[entry + 24 : entry + 24 + length].decode().partition("amdgcn-amd-amdhsa-")
            )
            entry += 24 + length
            if kind.startswith("hip") and size:
                objects[target.lstrip("-")] = data[at + offset : at + offset + size]
        found.append(objects)
        at = data.find(MAGIC, entry)
    if not found:
        what = (
            "compressed bundles: build without --offload-compress"
            if COMPRESSED in data
            else "no GPU code"
        )
        raise SystemExit(f"code_objects.py: {what}")
    return found


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    library, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for number, objects in enumerate(bundles(library.read_bytes())):
        for target, code in objects.items():
            path = folder / f"{library.name.split('.')[0]}.{number}.{target}.co"
            path.write_bytes(code)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
