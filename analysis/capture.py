"""Looking into a model: observers of its attention that are gone when the block ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from model.attention import Observation
from model.transformer import GPT


@contextmanager
def observe(model: GPT, fn: Callable[[Observation], None]) -> Iterator[None]:
    """Call `fn` with what each attention layer computes in the forward passes inside; always removed."""
    layers = model.attentions()
    for attention in layers:
        attention.observers.append(fn)
    try:
        yield
    finally:
        for attention in layers:
            attention.observers.remove(fn)
