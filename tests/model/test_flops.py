"""Operations of training a token, counted one by one."""

import pytest

from tests.model.models import KINDS, VOCAB, build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 7, 31])
def test_every_weight_counts_six_and_every_key_twelve_by_its_width(kind: str, window: int | None) -> None:
    """A key costs a product and a sum for its score, and for its value, per feature; backward twice that."""
    model = build(kind, window=window)
    c, T = model.config, model.config.context_length
    weights = model.num_parameters() - c.context_length * c.d_model * (c.position == "learned")
    if not c.tie_embeddings:
        weights -= VOCAB * c.d_model  # the head alone multiplies
    seen = [min(t + 0.5, window or T) for t in range(T)]  # a token sees half of itself, as in T / 2
    if window:
        seen = [t + 0.5 if t < window else window for t in range(T)]
    keys = sum(seen) / T
    assert model.flops_per_token() == pytest.approx(
        6 * weights + 12 * c.n_layer * c.n_head * c.d_head * keys, rel=1e-12
    )


def test_in_a_full_context_attention_costs_6_L_C_T() -> None:  # noqa: N802
    model = build("attention only", d_head=6, context_length=32)
    without = build("attention only", d_head=6, context_length=32).num_parameters()
    without -= (32 + VOCAB) * 24
    assert model.flops_per_token() - 6 * without == 6 * 2 * 24 * 32


def test_a_wider_window_costs_more_and_none_the_most() -> None:
    costs = [build(window=w).flops_per_token() for w in [*range(1, 32), None]]
    assert costs == sorted({*costs})
