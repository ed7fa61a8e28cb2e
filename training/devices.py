"""Where a run computes: `run.device`, and whether it can be compiled for there."""

from collections.abc import Callable

import torch
from torch import Tensor

from configs import UserError
from data.sources import Batch
from model.transformer import GPT

CPU = torch.device("cpu")


def choose_device(asked: str) -> torch.device:
    """What `run.device` stands for; who asks for the CPU gets it without a look at anything else.

    Raises `UserError` for a device that is not there.
    """
    if asked == "cpu":
        return CPU
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there[asked]:
        names = ", ".join(name for name, is_there in there.items() if is_there)
        raise UserError(f"run.device {asked}: this machine, or its PyTorch, has none; it has {names}")
    return torch.device(asked)


def name_of(device: torch.device) -> str:
    """As `cpu`, or with the name of the chip."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type


def compiled(model: GPT) -> Callable[..., Tensor]:
    """`torch.compile`, which would look for a C++ compiler at the first step only.

    Raises `UserError` where the model is on a CPU and there is none.
    """
    if model.device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # slow
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            ways = "install g++ (or clang++ and set CXX), or set train.compile false"
            raise UserError(f"train.compile needs a C++ compiler on a CPU; none is found: {ways}") from None
    return torch.compile(model)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there; to CUDA from pinned memory, so that the copy does not hold up the program."""
    if device.type == "cpu":
        return batch
    cuda = device.type == "cuda"

    def moved(part: Tensor | None) -> Tensor | None:
        return part if part is None else (part.pin_memory() if cuda else part).to(device, non_blocking=cuda)

    return Batch._make(map(moved, batch))
