"""The README's curl commands, run as they stand there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands() -> list[tuple[str, str]]:
    """Each command of the block for the shell, and what the README says that it prints."""
    (block,) = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    found = re.findall(r"((?:^[^#].*\n)+)((?:^#.*\n)+)", block, re.MULTILINE)
    assert "".join(command + shown for command, shown in found) == block
    return [(command, re.sub(r"^# ?", "", shown, flags=re.M)) for command, shown in found]


def check(url: str) -> None:
    """Runs them all against a server; "..." stands for anything."""
    for command, shown in commands():
        here = command.replace("http://127.0.0.1:8000", url)
        done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        # A line that goes on begins with a space here: the server writes none there.
        want = re.escape(shown.strip().replace("\n ", "")).replace(re.escape("..."), ".*")
        assert re.fullmatch(want, done.stdout.strip(), re.DOTALL), (command, done.stdout)
