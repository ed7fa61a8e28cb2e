"""Thin commands: `python -m scripts.NAME --help`. Slow imports come after the words are read."""

import sys
from argparse import Namespace
from collections.abc import Callable

from configs import UserError
from configs.cli import Parser


def serve(parser: Parser, work: Callable[[Namespace], None]) -> None:
    """Read the command line and do the work; a wrong request is one line and exit code 2."""
    try:
        work(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
