"""Counters and gauges as dataclass fields, and their Prometheus text form."""

from __future__ import annotations

import dataclasses


def counter(text: str) -> int:
    """A field that only grows."""
    return dataclasses.field(default=0, metadata={"help": text, "type": "counter"})


def gauge(text: str) -> int:
    """A field that says how things are now."""
    return dataclasses.field(default=0, metadata={"help": text, "type": "gauge"})


@dataclasses.dataclass
class Stats:
    """Fields made with `counter` and `gauge`; the help texts say what they count."""

    def prometheus(self, prefix: str) -> str:
        """The text exposition format 0.0.4; counters end in ``_total``."""
        lines = []
        for field in dataclasses.fields(self):
            kind = field.metadata["type"]
            name = f"{prefix}_{field.name}" + ("_total" if kind == "counter" else "")
            lines += [
                f"# HELP {name} {field.metadata['help']}",
                f"# TYPE {name} {kind}",
                f"{name} {getattr(self, field.name)}",
            ]
        return "\n".join(lines) + "\n"
