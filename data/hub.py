"""Documents through the library `datasets`: of a data set of the hub, of a local folder with one, of files.

Rows come from there; a row is a document, or with `data.new_document` a line of one. Documents are handed on
in pieces, so that memory stays bounded however long they are.
"""

import codecs
import glob
import hashlib
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from configs import UserError
from configs.files import LARGE
from configs.schema import Data
from data.corpora import files_of

PIECE = 2**20  # characters
# Where every byte-pair encoding splits, so that the pieces tokenize as the whole does: behind a newline or in
# front of a space, if it is single and a letter or digit follows. (Behind two newlines GPT-2's does not: its
# `\s+(?!\S)` takes both at the end of a text, but leaves the second one alone where more follows.)
CUT = re.compile(r"(?<=\S\n)(?=\w)|(?<=\S)(?= \w)")
COMPRESSIONS = {".gz", ".bz2", ".xz"}
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # all else is plain text
NO_NETWORK = "HF_HUB_OFFLINE=1 reads what data.streaming false has downloaded before, data.path your files"


class Piece(NamedTuple):
    """A document, or about PIECE characters of a long one, and the part that its document belongs to."""

    text: str
    begins: bool
    part: str


class Corpus:
    """Iterates over pieces, each with the state from which another Corpus goes on behind it.

    A document is of the validation part by a hash of its first PIECE characters. `skipped` counts the rows
    that were null or empty so far. Raises `UserError` for what cannot be read.
    """

    def __init__(self, config: Data, state: dict[str, Any] | None = None):
        self.config, self.place = config, config.path or config.name or ""
        self.state = state or {"dataset": None, "rows": 0, "documents": 0, "pieces": 0, "skipped": {}}
        self.skipped = Counter(self.state["skipped"])
        self.files = files_of(config.path) if config.path else []
        self.kind = _kind(config, self.files) if self.files else ""

    def __iter__(self) -> Iterator[tuple[Piece, dict[str, Any]]]:
        known, share = self.state["pieces"], self.config.val_fraction or 0
        for _, rows in groupby(self._rows(), key=lambda row: row[0]):
            _, first, state = next(rows)
            part = ""
            for number, text in enumerate(_pieces(chain([first], (text for _, text, _ in rows)))):
                if number == 0:
                    draw = int.from_bytes(hashlib.sha256(text[:PIECE].encode()).digest()[:6]) / 2**48
                    part = "val" if draw < share else "train"
                if number >= known:  # of the first document: read again, not handed on
                    yield Piece(text, number == 0, part), state | {"pieces": number + 1}
            known = 0

    def _rows(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """The number of its document, the text, and the state in front of each row that has text."""
        position, count, documents = (self.state[key] for key in ("dataset", "rows", "documents"))
        column, lines = self.config.text_column or "", self.config.new_document
        for row, behind in self._read(position):
            state = {"dataset": position, "rows": count, "documents": documents}
            state["skipped"] = dict(self.skipped)
            position, count, text = behind, count + 1, row[column]
            if text is not None and not isinstance(text, str):
                what = f"data.text_column {column} holds {text!r:.60}, which is not text"
                raise UserError(f"{self.place}, row {count:,}: {what}")
            if text is not None and lines and self.kind != "text":
                text = text.removesuffix("\n") + "\n"  # an empty line of WikiText is an empty row
            if not text:
                self.skipped["null" if text is None else "empty"] += 1
                continue
            begins = row.get("begins", not lines) or not documents
            if begins or (lines and row.get("is_line", True) and re.search(lines, text)):
                if documents == self.config.take:
                    return
                documents += 1
            yield documents, text, state

    def _read(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
        """Rows from a position on, as `datasets` gives them, and the position behind each."""
        try:
            dataset = self._load()
            if position:
                dataset.load_state_dict(position)
            for row in dataset:
                yield row, dataset.state_dict()
        except UserError:
            raise
        except Exception as error:  # `datasets` and what it stands on raise anything
            raise UserError(self._explain(error.__cause__ or error)) from None

    def _load(self) -> Any:
        """An `IterableDataset` of rows with text."""
        import datasets

        datasets.config.TORCH_AVAILABLE = False  # else torch is imported, to derive from its IterableDataset
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        config, column = self.config, self.config.text_column or ""
        if self.kind != "parquet" and self.files:
            lines = bool(config.new_document)
            ours = _json_lines if self.kind == "json" else partial(_plain, lines=lines)
            return datasets.IterableDataset.from_generator(
                partial(ours, column=column), gen_kwargs={"paths": self.files}
            )
        common: dict[str, Any] = {"split": config.split, "streaming": config.streaming}
        if self.files:
            paths = [glob.escape(os.path.abspath(path)) for path in self.files]
            dataset = datasets.load_dataset("parquet", data_files=paths, **common)
        else:
            if not (os.path.isdir(self.place) or datasets.config.HF_HUB_OFFLINE):
                _ask_hub(self.place, config.revision)
            dataset = datasets.load_dataset(self.place, config.subset, revision=config.revision, **common)
        if not config.streaming:
            dataset = dataset.to_iterable_dataset()
        columns = dataset.column_names or [*next(iter(dataset), {})]
        if column not in columns:
            has = f"{self.place} has {', '.join(columns) or 'none'}"
            raise UserError(f"data.text_column {column}: no such column; {has}")
        return dataset.select_columns([column])

    def _explain(self, error: BaseException) -> str:
        for path in self.files:
            if fault := _fault(path):
                return f"cannot read {path}: {fault}"
        said = " ".join(str(error).split("\nExample of usage")[0].split())
        if self.files:
            return f"cannot read {self.place}: {said}"
        ways = NO_NETWORK if isinstance(error, ConnectionError) else "see data.subset, split and revision"
        return f"data.name {self.place}: {said}; {ways}"


def _kind(config: Data, files: list[str]) -> str:
    """What these files are, one of `KINDS` or text. Raises `UserError` where they are not all the same."""
    kinds: dict[str, str] = {}
    for path in files:
        suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSIONS]
        suffix = suffixes[-1] if suffixes else "no suffix"
        kinds[suffix] = KINDS.get(suffix.lower(), "text")
    if len({*kinds.values()}) > 1:
        told = ", ".join(f"{suffix} ({kind})" for suffix, kind in sorted(kinds.items()))
        raise UserError(f"data.path {config.path!r} matches several kinds of files: {told}; name one kind")
    return kinds.popitem()[1]


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text, cut where it must be so that PIECE <= length < 2 PIECE but for the last."""
    held = ""
    for text in texts:
        held, at = held + text, 0
        while len(held) - at >= 2 * PIECE:
            found = CUT.search(held, at + PIECE, at + 2 * PIECE)
            end = found.start() if found else at + PIECE
            yield held[at:end]
            at = end
        held = held[at:]
    if held:
        yield held


def _plain(paths: list[str], column: str, lines: bool) -> Iterator[dict[str, Any]]:
    """Blocks or lines of plain text, line ends as they are: the builder `text` would make LF of all."""
    for path in paths:
        decode, at, begins, data = codecs.getincrementaldecoder("utf-8")(), 0, True, b"\n"
        with fsspec.open(path, "rb", compression="infer") as file:
            while begins or data:
                is_line, pending = data.endswith(b"\n"), len(decode.getstate()[0])  # one may come in parts
                data = file.readline(PIECE) if lines else file.read(PIECE)
                try:
                    text = decode.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    place = f"{error.reason} at byte {at - pending + error.start}"
                    raise UserError(f"{path} is not UTF-8 text: {place}") from None
                if text or begins:
                    yield {column: text, "begins": begins, "is_line": is_line}
                at, begins = at + len(data), False


def _json_lines(paths: list[str], column: str) -> Iterator[dict[str, Any]]:
    """One object a line: the builder `json` guesses types from the first rows, and rewrites texts by them."""
    for path in paths:
        with fsspec.open(path, "rb", compression="infer") as file:
            for number, line in enumerate(iter(partial(file.readline, LARGE), b""), 1):
                if len(line) == LARGE:
                    raise UserError(f"{path}, line {number:,}: {LARGE:,} bytes and no end; a line is a row")
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("no object; a line is read as one")
                    if column not in row:
                        raise ValueError(f"no data.text_column {column}; it has {', '.join(row)}")
                    if isinstance(row[column], str):
                        row[column].encode()  # fails at half a surrogate pair, which is no text
                except ValueError as error:
                    raise UserError(f"cannot read {path}: line {number:,}: {error}") from None
                yield {column: row[column]}


def _fault(path: str) -> str:
    """What is wrong with a parquet file, if anything: `datasets` does not name it."""
    import pyarrow.parquet

    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            deque(pyarrow.parquet.ParquetFile(file).iter_batches(), maxlen=0)
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _ask_hub(name: str, revision: str | None) -> None:
    """Raises `UserError` where it is not there, within seconds: `datasets` would try for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, revision=revision, timeout=5)
    except (HFValidationError, RepositoryNotFoundError):
        ways = "or it needs leave: ask for it on its page, then `hf auth login` or HF_TOKEN"
        told = f"data.name {name}: no such folder, and no such data set on the hub, {ways}"
        raise UserError(told) from None
    except HfHubHTTPError as error:
        raise UserError(f"data.name {name}: {str(error).strip().splitlines()[0]}") from None
    except Exception as error:  # whatever the network does
        raise UserError(f"data.name {name}: the hub cannot be reached ({error}); {NO_NETWORK}") from None
