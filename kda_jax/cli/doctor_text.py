"""The doctor's report as text."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from . import screen


def show(found: dict[str, Any]) -> None:
    """Print the report of doctor.report()."""
    out = screen.console()
    about = Table(show_header=False, title=f"kda_jax {found['kda_jax']}", title_justify="left")
    about.add_column(no_wrap=True)
    about.add_column(overflow="fold")
    about.add_row("python", f"{found['python']}, {found['machine']}")
    for name, version in found["packages"].items():
        about.add_row(name, version or "not installed")
    for plugin in found["plugins"]:
        problem = plugin["problem"]
        about.add_row(
            plugin["name"], plugin["version"] + (f"  PROBLEM: {problem}" if problem else "")
        )
    if not found["plugins"]:
        about.add_row("plugins", "none (CPU only)")
    _native_rows(about, found["native"])
    if found["device_error"]:
        about.add_row("devices", f"PROBLEM: {found['device_error']}")
    for device in found["devices"]:
        default = "  (default)" if device["platform"] == found["default_backend"] else ""
        which = " ".join(filter(None, (device["kind"], device["architecture"])))
        about.add_row("device", f"{device['platform']}:{device['id']} {which}{default}")
        if device["problem"]:
            about.add_row("", f"PROBLEM: {device['problem']}")
    out.print(about)
    if not found["backends"]:  # no device to try them on
        return

    table = Table(title="Backends", title_justify="left")
    table.add_column("backend", no_wrap=True)
    table.add_column("works here", no_wrap=True)
    table.add_column("checkpoints", no_wrap=True)
    table.add_column("why", overflow="fold")
    for backend in found["backends"]:
        alignment = backend["checkpoint_alignment"]
        where = {None: "no", 1: "any token"}.get(alignment, f"every {alignment}")
        table.add_row(
            backend["name"],
            "yes" if backend["works"] else "no",
            where,
            backend["reason"],
        )
    out.print(table)


def _native_rows(about: Table, native: dict[str, Any]) -> None:
    about.add_row("FFI of jaxlib", native["jaxlib_ffi_version"] or "unknown")
    for library in native["libraries"]:
        built = library["architectures"] or native["cpu_instruction_set"] or "unknown"
        state = "" if library["platform"] in native["available_platforms"] else "not used, "
        about.add_row(
            f"native {library['platform']}",
            f"{state}FFI {library['ffi_version'] or 'unknown'}, for {built}: {library['path']}",
        )
    for platform, reason in native["reasons"].items():
        if platform not in native["available_platforms"]:
            about.add_row(f"native {platform}", reason)
