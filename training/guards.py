"""Stopping well: at the first number that is not finite, and when someone presses Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
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
        return "the loss (all layers are finite)"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {_place(name)}"
    return "the norm of the gradient (each gradient by itself is finite)"


def _place(name: str) -> str:
    """`blocks.1.attention.W_q` as `layer 1, attention.W_q`; `heads` is what the attention kernel returned."""
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 1:
        return f"layer {parts[1]}" + (f", {'.'.join(parts[2:])}" if parts[2:] else "")
    return name


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come. A second signal acts at once."""
    received = False
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        restore()

    for number in signals:
        signal.signal(number, note)
    try:
        yield lambda: received
    finally:
        restore()
