"""Stopping well: at the first number that is not finite, without memory, and when someone presses Ctrl-C."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from training import Stopped
from training.checkpoints import State, path_of, steps_in
from training.distributed import gathered


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names the parameters that hold a number that is not finite."""
    named = model.named_parameters()
    return [f"parameter {_place(name)}" for name, p in named if not gathered(p.detach()).isfinite().all()]


def first_nonfinite(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Names the first tensor that is not finite: parameters, then outputs in forward order, then gradients.

    `forward` repeats the computation that went wrong and returns its loss.
    """
    found = nonfinite_parameters(model)

    def watch(name: str) -> Callable[..., None]:
        return lambda module, inputs, out: None if out.isfinite().all() else found.append(f"output of {name}")

    handles = [m.register_forward_hook(watch(_place(name))) for name, m in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    found += [] if loss.isfinite().all() else ["the loss"]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            found.append(f"gradient of {_place(name)}")
    return next(iter(found), "the norm of the gradient")


def stop(folder: Path, step: int, culprit: str) -> NoReturn:
    """End the run in `folder` before a number that is not finite reaches the weights or a checkpoint."""
    saved = folder / "checkpoints"
    good = next((path_of(saved, s) for s in reversed(steps_in(saved))), "none yet")
    raise Stopped(f"step {step}: the first tensor that is not finite is {culprit}; last good: {good}")


def _place(name: str) -> str:
    """`blocks.1.attention.W_q` as `layer 1, attention.W_q`; `heads` is what the attention kernel returned."""
    return re.sub(r"^blocks\.(\d+)\.?", r"layer \1, ", name).removesuffix(", ")


@contextmanager
def enough_memory(state: State) -> Iterator[None]:
    """Turns an error of an allocator, on the CPU or a device, into `Stopped`; others pass through."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        told = str(error).split("\n")[0]
        if not (isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", told)):
            raise
        ways = "try a smaller train.batch_size; --dry_run tells what a run needs"
        raise Stopped(f"after step {state.step}: out of memory: {told.rstrip('.')}; {ways}") from error


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come; a second one ends at once."""
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        print("\nending after this step, with a checkpoint; a second signal ends at once", file=sys.stderr)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
