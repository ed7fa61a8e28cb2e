"""Configuration: typed sections (`schema.py`), command line (`cli.py`), presets (`*.yaml`). Imports no torch."""


class UserError(Exception):
    """The request was wrong. The message says what was asked, what is possible and what to do; exit code 2."""
