"""Typed sections (`schema.py`), command line (`cli.py`), presets (`*.yaml`), what every room needs for files
(`files.py`), the screen (`screen.py`) and seeds (`seeds.py`). Imports no torch.
"""

from configs.screen import printable


class UserError(Exception):
    """The request was wrong: says what was asked, what is possible and what to do. Exit code 2.

    What a file brings into the message cannot reach a terminal raw, and not without end.
    """

    def __init__(self, message: str):
        lines = message[:LONGEST_MESSAGE].split("\n")
        super().__init__("\n".join(map(printable, lines)) + (" ..." if message[LONGEST_MESSAGE:] else ""))


LONGEST_MESSAGE = 4000
