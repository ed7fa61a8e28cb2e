"""A device that is not there: tensors of the CPU that say they are on it, and may not meet the others.

It is as strict as any that PyTorch has: no float64 on it (MPS), no mixing but of single numbers, and the
CPU's generators draw on the CPU alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

THERE = torch.device("cuda")


class Elsewhere(TorchFunctionMode):
    """While active, `x.to(THERE)` and `device=THERE` work, and what would fail there raises `Misplaced`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return THERE if is_there(args[0]) else torch.device("cpu")
        asked = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        if asked or func is Tensor.cpu:
            args = tuple(x for x in args if not isinstance(x, torch.device))
            kwargs.pop("device", None)
            result = func(*args, **kwargs)
            if args and result is args[0]:  # it was on the CPU in truth
                result = result.clone()
            return place(result, bool(asked) and asked[0] == THERE)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [is_there(x) for x in inputs]
        sizes = [place for x, place in zip(inputs, there, strict=True) if x.dim() or place]
        if len({*sizes}) > 1:
            raise Misplaced(f"{name} of tensors here and there")
        if any(there) and kwargs.get("generator") is not None:
            raise Misplaced(f"{name} with a generator of the CPU")
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and any(there):
                place(x, True)
        return result


class Misplaced(Exception):
    """Tensors of two devices met, or one is where it cannot be."""


def is_there(x: Tensor) -> bool:
    return getattr(x, "is_there", False)


def place(x: Tensor, there: bool) -> Tensor:
    if there and x.dtype == torch.float64:
        raise Misplaced("float64")
    x.is_there = there
    return x


def to_elsewhere(module: nn.Module, device: torch.device) -> nn.Module:
    """What `module.to` does, in its stead."""
    for x in tensors_of(module):
        place(x, device == THERE)
    return module


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
