"""What the user did wrong, or what this machine lacks: one line, exit code 2."""


class CliError(Exception):
    """The message says what is wrong and what to do about it."""
