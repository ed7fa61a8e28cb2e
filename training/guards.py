"""Stopping well: at the first number that is not finite, and when someone presses Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


def first_nonfinite(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Names the first tensor that is not finite: parameters, then outputs in forward order, then gradients.

    `forward` repeats the computation that went wrong and returns its loss.
    """
    names, parameters = (
        {module: name for name, module in model.named_modules()},
        dict(model.named_parameters()),
    )
    found = [f"parameter {name}" for name, p in parameters.items() if not p.isfinite().all()]

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module in names and not output.isfinite().all():
            found.append(f"output of {names[module]}")

    with torch.no_grad():
        handle = register_module_forward_hook(watch)
        try:
            loss = forward()
        finally:
            handle.remove()
    found += [] if loss.isfinite().all() else ["the loss"]
    found += [
        f"gradient of {n}"
        for n, p in parameters.items()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    return [*found, "the norm of the gradient"][0]


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come; a second one ends at once."""
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
