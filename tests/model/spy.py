"""Sees every tensor that PyTorch makes: its shape, and how many bytes are alive at once."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Spy(TorchDispatchMode):
    """`shapes` of all results and the `peak` of bytes they held together while active, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.shapes.add(tuple(tensor.shape))
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

    def matrices(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Shapes with one axis of at least `rows` and another of at least `columns`, rows <= columns."""
        sorted_shapes = [(shape, sorted(shape, reverse=True)) for shape in self.shapes if len(shape) >= 2]
        return [shape for shape, (first, second, *_) in sorted_shapes if first >= columns and second >= rows]
