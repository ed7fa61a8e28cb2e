"""What the experiments of costs find, on smaller sizes and without a clock, and what they say of a fault."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from analysis.derivation import cost
from analysis.derivation.finding import Finding
from model.backends import BACKENDS, blocks, naive
from model.cache import LayerCache
from tests.analysis.derivation.planting import GIVEN


def by_operations(inputs: Mapping[int, Sequence[Tensor]]) -> dict[int, float]:
    return {size: float(q.size(2) ** 2 * q.size(3)) for size, (q, *_) in inputs.items()}


def by_name(runs: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, np.ndarray]:
    """Plain attention takes ten times as long as fused; a token one more than there are key heads."""
    jitter = np.random.default_rng(0).uniform(0.99, 1.01, (len(runs), 11))
    for run in runs.values():
        run()
    times = {name: 10 if name == "naive" else 1 if isinstance(name, str) else 1 + name for name in runs}
    return {name: time * noise for (name, time), noise in zip(times.items(), jitter, strict=True)}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LENGTHS", [256, 512, 1024, 1536, 2048])
    monkeypatch.setattr(cost, "LENGTH", 512)
    monkeypatch.setattr(cost, "LONG", 1024)
    monkeypatch.setattr(cost, "WIDE_LENGTHS", [64, 128, 256])
    monkeypatch.setattr(cost, "WIDTHS", [16, 64, 256, 2048, 4096, 8192])
    monkeypatch.setattr(cost, "ROWS", [8, 16, 32])
    monkeypatch.setattr(cost, "CONTEXT", 64)
    monkeypatch.setattr(cost, "_fastest", by_operations)
    monkeypatch.setattr(cost, "seconds", by_name)


def failed(finding: Finding) -> list[str]:
    """Outside of its bounds; small sizes leave some undecided."""
    return [check.what for check in finding.checks if check.holds is False]


def measured(finding: Finding, what: str) -> float:
    return next(check.measured for check in finding.checks if check.what.startswith(what))


def test_plain_attention_is_as_the_statement_says_but_for_memory_in_d() -> None:
    finding = cost.plain(GIVEN)
    assert finding.verdict == "holds in part"
    assert failed(finding) == ["memory: exponent of d"]
    assert measured(finding, "memory: exponent of d") == pytest.approx(0, abs=0.02)
    assert measured(finding, "one head's matrix") == 128


def test_without_the_matrix_nothing_of_plain_attention_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "naive", BACKENDS["sdpa"])
    finding = cost.plain(GIVEN)
    assert finding.verdict == "does not hold"
    assert "memory: exponent of n" in failed(finding)


def test_a_matrix_that_grew_with_d_would_make_the_statement_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def wasteful(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        A_BHTS = naive.scores(q, k, options["scale"]).softmax(-1)
        return (A_BHTS.unsqueeze(-1) * v.unsqueeze(2)).sum(3), None

    monkeypatch.setitem(BACKENDS, "naive", wasteful)
    monkeypatch.setattr(cost, "LENGTHS", [64, 128, 192, 256])
    monkeypatch.setattr(cost, "WIDTHS", [16, 32, 64, 128, 256, 2048, 2049, 2050])
    monkeypatch.setattr(cost, "LENGTH", 128)
    assert cost.plain(GIVEN).verdict == "holds"


def test_fused_attention_is_as_the_statement_says_but_for_the_backward_pass() -> None:
    """Which makes each score again: 7 products of matrices where plain attention needs 6."""
    finding = cost.fused(GIVEN)
    assert finding.verdict == "holds in part"
    assert failed(finding) == ["operations a pair, blocks over naive, forward and backward"]
    assert measured(finding, "operations a pair, blocks over naive, forward and") == pytest.approx(7 / 6)


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
def test_another_result_than_plain_attention_refutes_the_fused_one(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = BACKENDS[backend]

    def unscaled(*inputs: Tensor, scale: float, **options: Any) -> tuple[Tensor, Tensor | None]:
        return attend(*inputs, scale=1.0, **options)

    monkeypatch.setitem(BACKENDS, backend, unscaled)
    finding = cost.fused(GIVEN)
    assert finding.verdict == "does not hold"
    assert f"{backend}: difference from naive in float64" in failed(finding)


def test_a_mask_off_by_one_refutes_what_fused_attention_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = naive.scores

    def shifted(q: Tensor, k: Tensor, *options: Any) -> Tensor:
        return scores(q, k, *options).roll(1, dims=-1)

    monkeypatch.setattr(naive, "scores", shifted)
    assert cost.fused(GIVEN).verdict == "does not hold"


def test_a_matrix_in_the_fused_pass_is_seen_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", naive.attend)
    assert "memory of sdpa: exponent of n" in failed(cost.fused(GIVEN))


def test_blocks_of_m_rows_read_all_earlier_keys_and_values_once_a_block() -> None:
    """1 + 2 + ... blocks of keys and as many of values, of 4 bytes."""
    inputs = cost._inputs(GIVEN.generator(), 640, 8)
    for rows in (32, 64, 160):
        count = 640 // rows
        expected = 2 * 4 * 8 * rows * count * (count + 1) // 2
        assert cost._meter("blocks", inputs, rows=rows).read == expected


def test_blocks_that_are_never_larger_read_as_much_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(*inputs: Tensor, rows: int = 0, **options: Any) -> tuple[Tensor, Tensor | None]:
        return blocks.attend(*inputs, **options)

    monkeypatch.setitem(BACKENDS, "blocks", stubborn)
    finding = cost.fused(GIVEN)
    assert "keys and values read: exponent of the rows of a block" in failed(finding)


def test_keys_that_come_to_the_wrong_group_while_decoding_overturn_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extend = LayerCache.extend
    swapped = lambda self, k, v: extend(self, k.flip(1), v)  # noqa: E731
    monkeypatch.setattr(LayerCache, "extend", swapped)
    assert cost.grouped(GIVEN).verdict == "does not hold"


def test_grouped_heads_shrink_the_cache_in_proportion() -> None:
    finding = cost.grouped(GIVEN)
    assert finding.verdict == "holds"
    token = 2 * cost.TEXTS * cost.D * 4 * (cost.CONTEXT + cost.SPARE) / cost.MIB
    assert [row[1] for row in finding.tables[0].rows] == [f"{heads * token:.1f}" for heads in (1, 2, 4, 8)]


def test_keys_kept_for_every_query_head_are_not_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    build, extend = LayerCache.__init__, LayerCache.extend

    def wasteful(self: LayerCache, config: Any, *arguments: Any) -> None:
        build(self, config.model_copy(update={"n_kv_head": config.n_head}), *arguments)

    def repeated(self: LayerCache, *new: Tensor) -> tuple[Tensor, Tensor]:
        return extend(self, *(x.repeat_interleave(8 // x.size(1), dim=1) for x in new))

    monkeypatch.setattr(LayerCache, "__init__", wasteful)
    monkeypatch.setattr(LayerCache, "extend", repeated)
    finding = cost.grouped(GIVEN)
    assert finding.verdict == "holds in part"
    assert failed(finding) == ["bytes of the cache: largest departure from proportion"]


def test_decoding_that_gains_nothing_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(runs: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, np.ndarray]:
        noise = np.random.default_rng(0).lognormal(0, 0.1, (len(runs), 35))
        return dict(zip(runs, noise, strict=True))

    monkeypatch.setattr(cost, "seconds", equal)
    assert cost.grouped(GIVEN).verdict == "holds in part"
