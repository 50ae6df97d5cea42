"""What the tests of the command line expect of all commands."""

from __future__ import annotations

from kda_jax.cli import main


def fits(text):
    return all(len(line) <= 80 for line in text.splitlines())


def one_line_error(capsys, argv, *parts):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n"), captured.err
    assert captured.err.startswith("python -m kda_jax")
    for part in parts:
        assert part in captured.err, captured.err
