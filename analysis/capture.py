"""Looking into a model without leaving a trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from model.attention import Observation
from model.transformer import GPT


@contextmanager
def observe(model: GPT, fn: Callable[[Observation], None]) -> Iterator[None]:
    """Call `fn` with what each attention layer computes in the forward passes inside; always removed at the end."""
    layers = model.attentions()
    for attention in layers:
        attention.observers.append(fn)
    try:
        yield
    finally:
        for attention in layers:
            attention.observers.remove(fn)


@contextmanager
def reading(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module comes back, also after an error."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
