"""Tensors that are still in a safetensors file, which nobody vouches for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs import UserError
from configs.files import SMALL, refuse_large
from configs.screen import foreign


class Stored(NamedTuple):
    """Its shape, and what reads it."""

    shape: list[int]
    read: Callable[[], Tensor]


def open_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of a file, by name: no memory for what they hold, bounded for what its header says.

    Raises `UserError`, which names the file without its folder.
    """
    try:
        refuse_large(path, None)
        with path.open("rb") as begin:
            if (length := int.from_bytes(begin.read(8), "little")) > SMALL:
                raise OSError(f"its header has {length:,} bytes, and {SMALL:,} are the most")
        file = safe_open(path, "pt")
        names = file.keys()
        return {n: Stored(file.get_slice(n).get_shape(), partial(file.get_tensor, n)) for n in names}
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"cannot read {foreign(path.name)}: {foreign(str(reason), 200)}") from None
