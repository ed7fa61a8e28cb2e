"""`torch.compile`: one graph, the same numbers, and observers of the module that shares its weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.capture import observe
from model.attention import Observation
from model.backends import BACKENDS
from model.transformer import GPT
from tests.model.models import KINDS, build_random, tokens

SEGMENT = torch.tensor([[0] * 10 + [1] * 6 + [-1] * 4, [-1] * 5 + [2] * 15])
CHANGES = {"plain": {}, "window": {"window": 5}, "dropout": {"dropout": 0.3}}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(model: GPT, call, segment: Tensor | None) -> dict[str, Tensor]:
    """Logits and gradients of a training step."""
    torch.manual_seed(1)
    model.zero_grad()
    logits_BTV = call(tokens(2, 20), segment_BT=segment)
    F.cross_entropy(logits_BTV.flatten(0, 1), tokens(2, 20, seed=1).flatten()).backward()
    return {"logits": logits_BTV.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@every_backend
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_is_one_graph_with_the_same_logits_and_gradients(kind, changes, documents, backend):
    """With dropout, blocks are computed once more in the backward pass, with the same mask.

    Dynamo leaves that to what follows it, and its own backend for debugging, `eager`, does not see to it: the
    next in line does.
    """
    model = build_random(kind, backend=backend, n_layer=1, **changes).train()
    in_blocks = backend == "blocks" or (backend == "sdpa" and (documents or model.config.window))
    last = "aot_eager" if changes.get("dropout") and in_blocks else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=last)
    segment = SEGMENT if documents else None
    expected = step(model, model, segment)
    for name, x in step(model, compiled, segment).items():
        bound = 1e-6 * max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(x, expected[name], atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@every_backend
def test_an_observer_sees_the_module_after_it_was_compiled(backend: str) -> None:
    model, seen = build_random(backend=backend).train(), list[Observation]()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(tokens(2, 20))
    with observe(model, seen.append), torch.no_grad():
        watched = model(tokens(2, 20))
    assert [layer.layer for layer in seen] == [0, 1]
    torch.testing.assert_close(watched, compiled(tokens(2, 20)), atol=1e-5, rtol=0)
    with torch.no_grad():
        model.head.weight.mul_(2)
    torch.testing.assert_close(compiled(tokens(2, 20)), 2 * watched, atol=1e-5, rtol=0)
