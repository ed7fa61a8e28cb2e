"""Stopping well: at the first number that is not finite, and when someone presses Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Names the first tensor that is not finite: parameters, then outputs in forward order, then gradients.

    `forward` repeats the computation that went wrong and returns its loss.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {_place(name)}"
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if not output.isfinite().all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"output of {_place(found[0])}"
    if not loss.isfinite().all():
        return "the loss, though all outputs are finite"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {_place(name)}"
    return "the norm of the gradient, though each part is finite"


def _place(name: str) -> str:
    """`blocks.1.attention.W_q` as `layer 1, attention.W_q`; `heads` is what the attention kernel returned."""
    parts = name.split(".")
    return (
        ", ".join([f"layer {parts[1]}", *filter(None, [".".join(parts[2:])])]) if "blocks" in parts else name
    )


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come; a second signal acts at once."""
    received = False
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: received
    finally:
        restore()
