"""Thin commands: `python -m scripts.NAME --help`. Slow imports come after the words are read."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from configs import UserError
from configs.cli import Parser
from configs.screen import out_of_memory, show_anything


def serve(parser: Parser, work: Callable[[Namespace], None], argv: list[str], verbatim: str) -> None:
    """Read the command line and do the work; a wrong request is one line and exit code 2.

    The word after the option `verbatim` is its value whatever it is: argparse would take a text that begins
    with "-" for an option, and "--" for nothing. Where its default is a list, each occurrence adds to it.
    """
    texts, others, words = [], [], iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        value = text if equals else next(words, None) if name == verbatim else None
        if name == verbatim and value is not None:
            texts.append(value)
        else:
            others.append(word)
    with exits():
        given = parser.parse_args(others)
        if texts:
            name = verbatim.lstrip("-")
            setattr(given, name, texts if isinstance(getattr(given, name), list) else texts[-1])
        work(given)


@contextmanager
def exits() -> Iterator[None]:
    """What goes wrong inside is one line and an exit code; a signal to end lets `finally` tidy up."""
    show_anything()
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]  # or nohup
    before = {n: signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in ends}
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # What stdout still holds cannot be written either: Python must not try at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as in `| head`: the reader has enough
            print(f"stopped: {error}", file=sys.stderr)
            sys.exit(1)
    except (RuntimeError, MemoryError) as error:
        if not (told := out_of_memory(error)):
            raise
        print(f"stopped: {told}; ask for less at once, such as fewer --sequences", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def warn(faults: Sequence[str]) -> None:
    """Tell what did not stop the work."""
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)
