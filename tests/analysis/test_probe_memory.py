"""A probe on fused kernels or on blocks of rows: memory grows with T, not with T x T."""

import pytest
import torch

from analysis.probes import Probe, measure
from tests.model.models import VOCAB, build_random
from tests.model.spy import Spy


def watch(backend: str, T: int) -> Spy:
    """Measure one layer of two heads on one sequence; no axis but T is longer than 128."""
    model = build_random(backend=backend, n_layer=1, n_head=2, n_kv_head=1, d_model=16, context_length=T)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (1, T), generator=generator)
    # Blocks of distinct tokens are beside the point here: a repeat as long as the context is.
    probes = {"text": Probe(text), "text_without_bos": Probe(text)}
    for name, s in (("repeat_short", T // 4), ("repeat_long", (T - 1) // 2)):
        probes[name] = Probe(text[:, : 2 * s + 1], block_length=s)
    with Spy() as spy:
        measure(model, probes, bos_trained=True)
    return spy


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
def test_memory_of_a_probe_grows_linearly_with_the_context(backend: str) -> None:
    short, long = watch(backend, 1024), watch(backend, 4096)
    assert 1 < long.peak / short.peak <= 4.5
    assert short.matrices(rows=1024, columns=1024) == []
    assert long.matrices(rows=1024, columns=1024) == []


def test_a_probe_on_fused_kernels_holds_no_block_of_weights_either() -> None:
    assert watch("sdpa", 1024).matrices(rows=65, columns=512) == []


def test_the_spy_sees_the_matrix_that_the_definition_builds() -> None:
    spy = watch("naive", 1024)
    assert spy.matrices(rows=1024, columns=1024)
    assert spy.peak > 4 * 2 * 1024**2
