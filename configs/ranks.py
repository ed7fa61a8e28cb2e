"""The processes that share each step of a run, as torchrun started them."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Ranks(NamedTuple):
    """Which of `number` processes this is; `add` sums a tensor on the CPU over all of them, in place."""

    rank: int = 0
    number: int = 1
    add: Callable[[Any], Any] = lambda tensor: tensor

    def has(self, index: int) -> bool:
        """Whether the index-th of the things that are shared out is this rank's."""
        return index % self.number == self.rank


ALONE = Ranks()


def is_first() -> bool:
    """Whether this is the one of torchrun's processes that speaks for all."""
    return processes() == 1 or os.environ["RANK"] == "0"


def processes() -> int:
    """How many torchrun has started; 1 where it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
