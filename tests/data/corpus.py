"""Corpora that tests write, and prepared folders read back by hand."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema import Data
from data import preparation
from data.tokenizers import Tokenizer, load_tokenizer

ODD = [
    "<|endoftext|>",
    "a\r\nb\rc\n",
    "\ufeffx",
    "nul\0nul",
    "ünï 😀\n\n",
    " ",
    "\n",
    "a\u2028b\x0cc\x85d\x1ce",
]


def asked(folder: Path, **values) -> Data:
    return Data(**{"source": "hf", "tokenizer": "byte", "cache_dir": str(folder / "cache"), **values})


def texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Documents of different lengths, no two equal."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, words, count)
    return [
        f"{i}: " + "".join(f"{word}" + " \n"[int(word % 7 == 0)] for word in rng.integers(0, 999, length))
        for i, length in enumerate(lengths)
    ]


def jsonl(path: Path, rows: list, column: str = "text") -> Path:
    lines = [json.dumps({"id": i, column: row}) + "\n" for i, row in enumerate(rows)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def parquet(path: Path, rows: list, groups: int = 7) -> Path:
    pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), path, row_group_size=groups)
    return path


def data_set(folder: Path, **subsets: list) -> Path:
    """A folder as it would be on the hub: a README.md that declares subsets, each with a split train."""
    declared = []
    for name, rows in subsets.items():
        (folder / name).mkdir(parents=True)
        parquet(folder / name / "train-0.parquet", rows[: len(rows) // 2])
        parquet(folder / name / "train-1.parquet", rows[len(rows) // 2 :])
        file = f"  - split: train\n    path: {name}/train-*.parquet\n"
        declared.append(f"- config_name: {name}\n  data_files:\n{file}")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(declared)}---\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(folder: Path) -> dict[str, list[str]]:
    """The documents of a prepared folder by part, straight from its files."""
    meta, tokenizer = (
        json.loads((folder / "meta.json").read_text()),
        load_tokenizer(folder / "tokenizer.json"),
    )
    parts = {}
    for part in ("train", "val"):
        shards = [np.fromfile(p, meta["dtype"]) for p in sorted(folder.glob(f"{part}-[0-9]*.bin"))]
        ids = np.concatenate(shards)
        begins = np.fromfile(folder / f"{part}-documents.bin", np.int64)
        assert meta[part]["tokens"] == len(ids)
        assert meta[part]["documents"] == len(begins)
        documents = np.split(ids, begins[1:])
        assert begins[0] == 0
        if meta["bos"] is not None:
            assert all(document[0] == meta["bos"] for document in documents)
            assert np.count_nonzero(ids == meta["bos"]) == len(begins)
        parts[part] = [tokenizer.decode(document) for document in documents]
    return parts


def prepared(config: Data, tokenizer: Tokenizer | None = None) -> Path:
    """The folder, for windows as short as can be."""
    return preparation.prepared(config, 1, tokenizer)
