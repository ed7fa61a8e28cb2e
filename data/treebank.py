"""Treebanks: sentences with the head of each word, from CoNLL-U files (universaldependencies.org)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from conllu.exceptions import ParseException
from conllu.parser import parse_id_value, parse_int_value

from configs import UserError
from configs.files import refuse_large
from configs.screen import foreign

LONGEST_LINE = 100_000  # characters: a line holds one word
MOST_BYTES = 2**28  # of a file, the largest treebanks have half


class Word(NamedTuple):
    """`text[begin:end]` of its sentence, in line `line` of the file.

    `head` is the place of its head among the sentence's words; None for a root and where none is given.
    `relation` has no subtype: `nsubj:pass` is nsubj.
    """

    begin: int
    end: int
    head: int | None
    relation: str
    line: int


class Sentence(NamedTuple):
    """What the forms make, with a space in between unless the file says SpaceAfter=No, and its words.

    Words share a span where a multi-word token hides them: French `du` is both `de` and `le`.
    """

    text: str
    words: list[Word]


class _Row(NamedTuple):
    line: int
    place: str  # file and line
    identity: Any  # of a word 1, of a multi-word token (1, "-", 2), of an empty node (1, ".", 1)
    form: str
    head: int | None
    relation: str
    space: str


def read_treebank(path: Path) -> list[Sentence]:
    """The sentences of a CoNLL-U file, empty nodes left out.

    Raises `UserError` for a file that is none or has no sentences; it names the first line that is wrong.
    """
    try:
        if path.is_file():  # or a pipe
            refuse_large(path, MOST_BYTES)
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # forms may hold other ends of lines
    except OSError as error:
        raise UserError(f"cannot read the treebank {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {number}: not UTF-8, as CoNLL-U is") from None
    sentences: list[Sentence] = []
    rows: list[_Row] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip() and not line.startswith("#"):
            rows.append(_row(path, number, line.removesuffix("\r")))
        elif rows and not line.strip():
            sentences.append(_sentence(rows))
            rows = []
    if not sentences:
        raise UserError(f"{path} holds no sentences: a treebank is a file in CoNLL-U")
    return sentences


def _row(path: Path, number: int, line: str) -> _Row:
    place, columns = f"{path}, line {number}", line.split("\t")
    if len(columns) != 10 or len(line) > LONGEST_LINE or not columns[1]:
        form = "a form" if columns[1:2] != [""] else "no form"
        got = f"{form}, {len(columns)} columns, {len(line)} characters"
        raise UserError(f"{place}: {got}; a word has a form, 10 columns, {LONGEST_LINE} characters at most")
    try:
        identity, head = parse_id_value(columns[0]), parse_int_value(columns[6])
    except (ParseException, ValueError):  # Python's own for thousands of digits
        got = f"id '{foreign(columns[0])}' or head '{foreign(columns[6])}'"
        raise UserError(f"{place}: {got} is no number as CoNLL-U has them") from None
    if not columns[7].isprintable():
        raise UserError(f"{place}: relation '{foreign(columns[7])}' has what cannot be printed")
    space = "" if "SpaceAfter=No" in columns[9].split("|") else " "
    return _Row(number, place, identity, columns[1], head, columns[7].partition(":")[0], space)


def _sentence(rows: Sequence[_Row]) -> Sentence:
    words: list[_Row] = []
    tokens: list[tuple[_Row, int]] = []  # of how many words each
    covered, empty = 0, 0  # words up to this one are in multi-word tokens; empty nodes since the last word
    for row in rows:
        match row.identity:
            case int(n) if n == len(words) + 1:
                words.append(row)
                tokens += [(row, 1)] if n > covered else []
                empty = 0
            case (n, "-", last) if n == len(words) + 1 > covered:
                tokens.append((row, last - n + 1))
                covered = last
            case (n, ".", nth) if (n, nth) == (len(words), empty + 1):
                empty = nth
            case _:
                raise UserError(f"{row.place}: id out of order: {len(words)} words stand before it")
    if covered > len(words):
        raise UserError(f"{tokens[-1][0].place}: multi-word token up to word {covered} of {len(words)}")
    for n, row in enumerate(words, 1):
        if row.head is not None and (row.head == n or not 0 <= row.head <= len(words)):
            raise UserError(
                f"{row.place}: head {row.head} of word {n} is no other of {len(words)} words, nor 0"
            )
    text, gap, spans = "", "", list[tuple[int, int]]()
    for row, count in tokens:
        text += gap
        begin, forms = len(text), [word.form for word in words[len(spans) : len(spans) + count]]
        text, gap = text + row.form, row.space
        # `don't` is `do` and `n't`, letter by letter; of `du` no letter belongs to `de` alone.
        parts = pairwise(accumulate(map(len, forms), initial=begin))
        spans += parts if "".join(forms) == row.form else [(begin, len(text))] * count
    pairs = zip(spans, words, strict=True)
    return Sentence(
        text, [Word(*s, row.head - 1 if row.head else None, row.relation, row.line) for s, row in pairs]
    )
