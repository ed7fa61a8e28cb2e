"""Typed sections (`schema.py`), command line (`cli.py`), presets (`*.yaml`), what every room needs for files
(`files.py`), the screen (`screen.py`) and seeds (`seeds.py`). Imports no torch.
"""


class UserError(Exception):
    """The request was wrong: says what was asked, what is possible and what to do. Exit code 2."""
