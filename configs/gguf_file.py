"""GGUF, the file format of llama.cpp: the package's reader behind a check that costs no memory."""

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import UserError
from configs.screen import foreign

if TYPE_CHECKING:
    from gguf import GGUFReader

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by type
STRING, ARRAY = 8, 9
LIMIT = 2**20  # values and tensors that a header may list; of each the reader makes objects of about 1 kB


def read_gguf(path: Path) -> "GGUFReader":
    """What a file says about its model and, mapped into memory, its tensors.

    Raises `UserError` for what is no GGUF file, ends too early, or has a header beyond all bounds.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader  # slow

        class Reader(GGUFReader):
            """Makes its many small views of a plain array: those of np.memmap take thrice the time."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

            def _build_tensors(self, start: int, fields: list[Any]) -> None:
                for _, name, _, lengths, kind, place in (field.parts for field in fields):
                    block, width = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
                    end = start + int(place[0]) + math.prod(lengths.tolist()) * width // block
                    if end > len(self.data):
                        raise ValueError(f"it ends before the end of tensor {bytes(name).decode()}")
                super()._build_tensors(start, fields)

        return Reader(path)
    except (OSError, ValueError, LookupError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read it as GGUF: {foreign(str(reason), 200)}") from None


class _Header:
    """Walks on from `at` as the reader is going to, which believes every number that it finds."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.listed = data, 0, 0

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("it ends in the middle of its header")

    def number(self, width: int) -> int:
        self.skip(width)
        return int.from_bytes(self.data[self.at - width : self.at], "little")

    def count(self) -> int:
        self.listed += (count := self.number(8))
        if self.listed > LIMIT:
            raise ValueError(f"its header lists more than {LIMIT:,} values")
        return count

    def check(self) -> None:
        if self.data[:4] != b"GGUF" or self.number(8) >> 32 not in (2, 3):
            raise ValueError("it does not begin as version 2 or 3 of the format does")
        tensors, keys = self.count(), self.count()
        for _ in range(keys):
            self.skip(self.number(8))  # a string: its length, then itself
            kind = self.number(4)
            kind, length = (self.number(4), self.count()) if kind == ARRAY else (kind, 1)
            if kind not in (*WIDTHS, STRING):
                raise ValueError(f"its header has values of type {kind:,}, which is unknown")
            for _ in range(length if kind == STRING else 0):
                self.skip(self.number(8))
            self.skip(length * WIDTHS.get(kind, 0))
        for _ in range(tensors):
            self.skip(self.number(8))
            if (axes := self.number(4)) > 4:
                raise ValueError(f"it has a tensor of {axes:,} axes; 4 are the most")
            self.skip(8 * axes + 4 + 8)  # lengths, type, place
