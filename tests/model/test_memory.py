"""What attention keeps in memory: no T x S matrix where a backend promises none."""

import pytest
import torch

from model.backends import BACKENDS, blocks
from tests.model.spy import Spy

T = 512


def watch(backend: str, **options: object) -> Spy:
    """Forward and backward on one sequence of two heads, of width 8: no axis but T is long."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, 8, generator=generator).requires_grad_() for _ in range(3))
    spy = Spy()
    with spy:
        out, _ = BACKENDS[backend](q, k, v, scale=0.3, **options)
        out.sum().backward()
    return spy


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_blocks_hold_a_block_of_rows_forward_and_backward(dropout_p: float) -> None:
    spy = watch("blocks", dropout_p=dropout_p)
    assert (1, 2, blocks.ROWS, T) in spy.shapes  # what it may build, and what the spy must have seen
    assert spy.matrices(rows=blocks.ROWS + 1, columns=blocks.ROWS + 1) == []


def test_blocks_hold_one_block_at_a_time_for_the_backward_pass() -> None:
    """Scores, weights, mask and their gradients of one block, not of all of them."""
    block_bytes = 4 * 2 * blocks.ROWS * T
    assert watch("blocks").peak < watch("naive").peak / 2
    assert watch("blocks").peak < 5 * block_bytes


@pytest.mark.parametrize("sink", [False, True])
def test_sdpa_holds_no_matrix_of_weights(sink: bool) -> None:
    options = {"sink_H": torch.zeros(2)} if sink else {}
    assert watch("sdpa", **options).matrices(rows=blocks.ROWS, columns=blocks.ROWS) == []


def test_sdpa_holds_a_block_of_rows_with_a_window() -> None:
    assert watch("sdpa", window=64).matrices(rows=blocks.ROWS + 1, columns=blocks.ROWS + 1) == []


def test_the_spy_sees_the_matrix_of_the_definition() -> None:
    assert watch("naive").matrices(rows=T, columns=T)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_token_reads_the_keys_of_its_cache_where_they_lie(groups: int, return_lse: bool) -> None:
    """A copy of them, once a query head, would cost ten times the attention."""
    q_BHTD, k_BGSD = torch.ones(3, 8, 1, 16), torch.ones(3, groups, T, 16)
    BACKENDS["sdpa"](q_BHTD, k_BGSD, k_BGSD, scale=0.3, return_lse=return_lse)  # compares its lse once
    with Spy() as spy:
        BACKENDS["sdpa"](q_BHTD, k_BGSD, k_BGSD, scale=0.3, return_lse=return_lse)
    assert 0 < spy.peak < 8 * q_BHTD.nbytes < k_BGSD.nbytes
