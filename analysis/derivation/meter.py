"""What a computation costs: bytes that are alive or move, and seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Bytes, while active, of the operations that make new tensors; those of a backward pass on CPUs, too.

    `peak`: the most that new tensors held together. `moved`: all that entered and left operations, as often
    as it did; `read`: of that, what entered from tensors in `watched`. What one of PyTorch's kernels keeps or
    moves inside is not seen.
    """

    def __init__(self, watched: Sequence[Tensor] = ()):
        super().__init__()
        self.peak = self.moved = self.read = 0
        self._watched = {_place(x) for x in watched}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        came, left = (
            [x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), result)
        )
        if not {_place(x) for x in left}.isdisjoint(_place(x) for x in came):
            return result  # a view, or in place
        self.moved += sum(x.nbytes for x in (*came, *left))
        self.read += sum(x.nbytes for x in came if _place(x) in self._watched)
        for x in left:
            self._alive[_place(x)] = (StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes())
        self._alive = {place: value for place, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def seconds(runs: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, np.ndarray]:
    """Of each run, once a round, in turns: what slows the machine for a while slows all of them.

    On CPUs one core's own time, in which other programs have no part. A round that warms up is not counted.
    """
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    cuda, threads = torch.cuda.is_available(), torch.get_num_threads()
    clock = time.perf_counter if cuda else time.thread_time
    torch.set_num_threads(1)
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if cuda:
                torch.cuda.synchronize()
            taken[name].append(clock() - start)
    torch.set_num_threads(threads)
    return {name: np.array(times[1:]) for name, times in taken.items()}


def _place(x: Tensor) -> int:
    return x.untyped_storage()._cdata
