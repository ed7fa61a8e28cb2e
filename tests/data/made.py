"""Sources whose tokens say where they come from.

The corpora are of distinct characters in ascending order, so the id of a token is its place in the text.
"""

import tempfile
from pathlib import Path

import numpy as np

from configs.schema import Config
from data.loading import load_source
from data.mixture import Mixture
from data.store import Part

T = 17


def load(context: int = T, rows: int = 4, seed: int = 1, **data) -> Mixture:
    """What `data` describes, in batches of `rows` windows of `context` tokens."""
    values = {"run": {"seed": seed}, "model": {"context_length": context}, "train": {"batch_size": rows}}
    return load_source(Config.model_validate({**values, "data": data}))


def places(train: int, val: int = 40, bos: bool = True, text: str = "", **values) -> Mixture:
    """Text whose token ids are 0 ... train - 1 and then, for validation, train ... train + val - 1."""
    with tempfile.TemporaryDirectory() as folder:  # the tokens stay mapped after it is gone
        path = Path(folder) / "places.txt"
        path.write_text(text or "".join(chr(0x10000 + i) for i in range(train + val)), encoding="utf-8")
        data = {"source": "text", "path": str(path), "bos": bos, "cache_dir": f"{folder}/cache"}
        return load(val_fraction=(val - 0.5) / (train + val), **data, **values)


def drawn(name: str, **values) -> Mixture:
    """The synthetic source `name` by itself, in windows of 32 tokens."""
    return load(**{"context": 32, "source": name, **values})


def ids_of(part: Part) -> np.ndarray:
    """All of its tokens, BOS included."""
    return part.rows(np.array([0]), len(part))[0]
