"""Stopping well: at the first number that is not finite, without memory, and when someone presses Ctrl-C."""

import math
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from configs.ranks import is_first, processes
from configs.screen import out_of_memory
from model.attention import CausalSelfAttention
from training import Stopped
from training.checkpoints import State
from training.distributed import gathered


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names the parameters that hold a number that is not finite."""
    named = model.named_parameters()
    return [f"parameter {place(name)}" for name, p in named if not gathered(p.detach()).isfinite().all()]


def first_nonfinite(model: nn.Module, losses: Iterable[Tensor], loss: float) -> str:
    """Names the first tensor that is not finite: parameters and outputs in forward order, then gradients.

    With the head, where only some of an attention's heads are bad.

    `losses` repeats the forward passes that went wrong, a micro-step each; `loss` is what they came to. The
    gradients are those of `model`.
    """
    found: list[str] = []

    def note(name: str, tensor: Tensor) -> None:
        if not found and not tensor.isfinite().all():
            found.append(name + heads_of(model, name, tensor))

    with torch.no_grad(), watched(model, note):
        for number, part in enumerate(losses, 1):
            note("the loss", part)
            if found and model.training and not found[0].startswith("parameter"):
                found[0] += f" in micro-step {number}"
            if found:
                return found[0]
    grads = {place(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    if names := [name for name, grad in grads.items() if not grad.isfinite().all()]:
        more = f" ({len(names)} are, up to that of {names[-1]})" if len(names) > 1 else ""
        head = heads_of(model, names[0], grads[names[0]])
        return f"gradient of {names[0]}{head} in the backward pass{more}"
    lost = "the loss, though it is finite when the step is repeated, uncompiled"
    return "the norm of the gradient" if math.isfinite(loss) else lost


def heads_of(model: nn.Module, name: str, tensor: Tensor) -> str:
    """The heads of an attention in which `tensor` is not finite, as `, head 2`; nothing where all are.

    `name` says which tensor it is, as in `first_nonfinite`; most hold no heads side by side.
    """
    found = re.search(r"layer (\d+), attention\.(W_[qkv]|W_gate|sink_H|heads|W_o\.weight)", name)
    attention = model.get_submodule(f"blocks.{found[1]}.attention") if found else None
    if not found or not isinstance(attention, CausalSelfAttention):
        return ""
    width = 1 if found[2] in ("W_gate", "sink_H") else attention.d_head
    last = name.startswith("output") or found[2] == "W_o.weight"  # else they are rows of a matrix
    bad_HD = (~tensor.isfinite()).movedim(-1 if last else 0, 0).unflatten(0, (-1, width))
    numbers = bad_HD.flatten(1).any(1).nonzero().flatten().tolist()
    if len(numbers) == len(bad_HD):
        return ""
    kind = {"W_k": "key ", "W_v": "value "}.get(found[2], "")
    return f", {kind}head{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@contextmanager
def watched(model: nn.Module, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `note(name, tensor)` in forward order: with each module's output, and with parameters before it.

    A parameter comes once, ahead of the output of the first module that it is part of or registered before:
    not every one is used by a module that is called.
    """
    modules = dict(model.named_modules())
    order = {name: n for n, name in enumerate(modules)}
    waiting = [(order[name.rpartition(".")[0]], name, p) for name, p in model.named_parameters()]

    def watch(name: str, last: int) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, out: Any) -> None:
            while waiting and waiting[0][0] <= last:
                _, used, parameter = waiting.pop(0)
                note(f"parameter {place(used)}", parameter)
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    note(f"output of {place(name)}", tensor)

        return leave

    ends = {name: order[name] + len([*module.modules()]) - 1 for name, module in modules.items()}
    handles = [m.register_forward_hook(watch(name, ends[name])) for name, m in modules.items() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def place(name: str) -> str:
    """`blocks.1.attention.W_q` as `layer 1, attention.W_q`; `heads` is what the attention kernel returned."""
    return re.sub(r"^blocks\.(\d+)\.?", r"layer \1, ", name).removesuffix(", ")


@contextmanager
def enough_memory(state: State) -> Iterator[None]:
    """Turns an error of an allocator, on the CPU or a device, into `Stopped`; others pass through."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (told := out_of_memory(error)):
            raise
        ways = "try a smaller train.batch_size; --dry_run tells what a run needs"
        raise Stopped(f"after step {state.step}: {told}; {ways}") from error


@contextmanager
def interruptible(saved: bool = False) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come; a second one, of either, ends at once.

    Where all is `saved` already, the first raises `KeyboardInterrupt`.
    """
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        when = "now; all is saved" if saved else "after this step, with a checkpoint"
        with suppress(OSError):  # print fails inside of a print that it interrupts
            if is_first():  # a signal to torchrun comes to all ranks
                os.write(2, f"\nending {when}; a second signal ends at once\n".encode())
        if saved:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    except BaseException:
        if processes() > 1:  # torchrun ends those that are left, which have to tell why and to close the logs
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
