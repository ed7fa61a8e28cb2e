"""Typed sections (`schema.py`), command line (`cli.py`), presets (`*.yaml`). Imports no torch."""


class UserError(Exception):
    """The request was wrong: says what was asked, what is possible and what to do. Exit code 2."""
