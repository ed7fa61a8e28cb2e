"""Part V: what attention costs in bytes, operations and seconds: plain, fused, and with fewer key heads."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from analysis.derivation import ablations, untrained
from analysis.derivation.drawing import BLUE, GREEN, GREY, RED, panels
from analysis.derivation.finding import Check, Experiment, Finding, Given, Table
from analysis.derivation.intervals import exponent, median
from analysis.derivation.meter import Meter, seconds
from configs.schema import Model
from model.backends import BACKENDS, blocks, naive
from model.cache import KVCache
from model.transformer import GPT

D = 64  # width of a head
LENGTHS = [512, 1024, 2048, 4096, 8192]
LENGTH, LONG = 2048, 4096  # where something else changes
WIDTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192]
WIDE = 2048  # from here on products of matrices take nearly all the time
WIDE_LENGTHS = [512, 768, 1024, 1536, 2048]
ROWS = [8, 16, 32, 64, 128]
KEY_HEADS, TEXTS, CONTEXT, SPARE = [1, 2, 4, 8], 8, 4096, 64
ROUNDS = 7
MIB = 2**20


def plain(given: Given) -> Finding:
    """Plain attention takes time and memory O(n² d); one head's matrix at n = 8,192 in 16 bits is 128 MiB.

    Method: one head of the backend naive, forward. Memory: the most bytes that the tensors it makes hold
    together, for n = 512 … 8,192 at d = 64 and for d = 16 … 256 at n = 2,048. Time: of one core, the fastest
    of seven rounds that take the sizes in turns, for n = 512 … 2,048 at d = 2,048 and for d = 2,048 … 8,192
    at n = 512, where products of matrices take nearly all of it. Exponents: least squares in logarithms, with
    the interval of Student's t over the sizes. The matrix: the bytes of that head's scores in bfloat16.

    Expected: exponents 2 in n and 1 in d by the statement, those of time nearer to them than to any other
    half; 128 MiB are 8,192² · 2 bytes. Closed form: n² numbers whatever d is, so memory has exponent 0 in d.
    """
    inputs = partial(_inputs, given.generator())
    bytes_n = {n: _meter("naive", inputs(n, D)).peak for n in LENGTHS}
    bytes_d = {d: _meter("naive", inputs(LENGTH, d)).peak for d in WIDTHS if d <= 256}
    time_n = _fastest({n: inputs(n, WIDE) for n in WIDE_LENGTHS})
    time_d = _fastest({d: inputs(512, d) for d in WIDTHS})
    wide_d = {d: time for d, time in time_d.items() if d >= WIDE}
    q, k, _ = (x.bfloat16() for x in inputs(8192, D))
    matrix = naive.scores(q, k, D**-0.5).nbytes
    matrices = bytes_n[LENGTHS[-1]] / (4 * LENGTHS[-1] ** 2)
    per_d, rest = np.polyfit(WIDTHS, [*time_d.values()], 1, w=1 / np.array([*time_d.values()]))
    fitted_d = {d: rest + per_d * d for d in WIDTHS}
    return Finding(
        checks=[
            Check("matrices of n² numbers that naive holds", matrices, 1, np.inf, "1 or more", premise=True),
            _power("time: exponent of n", time_n, 2, 0.25),
            _power("time: exponent of d", wide_d, 1, 0.25),
            _power("memory: exponent of n", bytes_n, 2, 0.1),
            _power("memory: exponent of d", bytes_d, 1, 0.1),
            Check("one head's matrix, n = 8,192, 16 bits (MiB)", matrix / MIB, 128, 128, "128 exactly"),
        ],
        says=[
            f"Memory grows as d to the power of {exponent(bytes_d)[0]:z.2f}. O(n² d) is the time; naive "
            f"needs memory O(n² + n d), at its peak {matrices:.1f} matrices of n² numbers.",
            f"Products of matrices take as long as all else at d = {rest / per_d:.0f}: a head of {D} spends "
            f"{rest / fitted_d[D]:.0%} of its time on making, masking and normalizing the matrix.",
            f"For 32 heads and 8 texts that one matrix takes {32 * 8 * matrix / 2**30:.0f} GiB.",
        ],
        figures=[_draw_plain(bytes_n, bytes_d, time_d, fitted_d)],
    )


def fused(given: Given) -> Finding:
    """Fused attention gives the same result with the same arithmetic and without the matrix in memory. Memory
    traffic falls from n² to n²/M, M the rows of a block; the gain is mostly that, not arithmetic.

    Method: outputs and gradients of sdpa (PyTorch's kernel) and of blocks against naive in float64. Memory:
    the most bytes that the tensors they make hold together, forward and backward, n = 1,024 … 8,192.
    Arithmetic: operations of all matrix products, counted, for each pair of query and key that is scored, of
    blocks over naive. Traffic: bytes of keys and values that enter operations of blocks, in blocks of 8 … 128
    rows, n = 4,096. Time: naive over sdpa, forward, n = 4,096, one core, the median of rounds.

    Expected: exponent of memory 1.0 ± 0.1; equal arithmetic, exponent of traffic -1 by the statement. Closed
    form: the keys of M rows at a time are n² d/M numbers, half of it by the mask; where M counts all numbers
    on the chip it is n² d²/M (Dao et al. 2022, 2205.14135). By the mask a fused pass may skip half of the
    arithmetic, a factor 2 in time: memory is the larger part of a gain above 4.
    """
    inputs = partial(_inputs, given.generator())
    peaks = {
        backend: {n: _meter(backend, inputs(n, D), backward=True).peak for n in LENGTHS[1:]}
        for backend in ("naive", "blocks", "sdpa")
    }
    forward, both = (_operations_a_pair(inputs(LENGTH, D), backward) for backward in (False, True))
    long = inputs(LONG, D)
    reads = {rows: _meter("blocks", long, rows=rows).read for rows in ROWS}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = [x.to(device) for x in long]
    matrix = here[0] @ here[1].mT
    runs = {"naive": partial(_pass, "naive", here), "sdpa": partial(_pass, "sdpa", here)}
    taken = seconds({**runs, "copy": matrix.clone}, ROUNDS)
    naive_rate = _meter("naive", here).moved / np.median(taken["naive"]) / 1e9
    copy_rate = 2 * matrix.nbytes / np.median(taken["copy"]) / 1e9
    faster, error = median(taken["naive"] / taken["sdpa"])
    on_gpu = "gain and achieved bandwidth on a GPU: `python -m scripts.derive --only 13` where there is one"
    return Finding(
        checks=[
            *(_agrees(backend, inputs(512, D)) for backend in ("sdpa", "blocks")),
            _power("memory of sdpa: exponent of n", peaks["sdpa"], 1, 0.1),
            _power("memory of blocks: exponent of n", peaks["blocks"], 1, 0.1),
            Check("operations a pair, blocks over naive, forward", forward, 1, 1, "1 exactly"),
            Check("operations a pair, blocks over naive, forward and backward", both, 1, 1, "1 exactly"),
            _power("keys and values read: exponent of the rows of a block", reads, -1, 0.1),
            Check(f"time of naive over sdpa, {device}", faster, 4, np.inf, "above 4", error),
        ],
        says=[
            f"The backward pass computes the scores again, {both:.2f} times the arithmetic of each pair in "
            "all; but pairs behind the mask, nearly half of them, are skipped.",
            f"Blocks of {ROWS[0]} rows read {reads[ROWS[0]] / MIB:,.0f} MiB of keys and values, blocks of "
            f"{ROWS[-1]} {reads[ROWS[-1]] / MIB:,.0f} MiB; there are {2 * long[0].nbytes / MIB:.0f} MiB.",
            f"On this {device} naive moves {naive_rate:.1f} GB/s into and out of its operations where plain "
            f"copying moves {copy_rate:.1f} GB/s; sdpa is {faster:.1f} times as fast.",
        ],
        figures=[_draw_fused(peaks, reads)],
        missing=[on_gpu] if device == "cpu" else [],
    )


def grouped(given: Given) -> Finding:
    """Query heads that share keys and values shrink the KV cache in proportion, and decoding is faster.

    Method: a GPT of one layer and 8 query heads of width 64, with 1, 2, 4 and 8 key heads; 8 texts at once.
    The bytes that its KV cache holds; one core's time for a token behind 4,096, the median of rounds. With 2
    key heads, the logits of 64 tokens read one by one through the cache against those of one pass.

    Expected: bytes exactly in proportion (Shazeer 2019, 1911.02150; Ainslie et al. 2023, 2305.13245). Time:
    more with 8 key heads than with 1, by no more than the bytes.
    """
    size, taken = _decode(given.generator())
    uneven = max(abs(size[heads] / size[1] / heads - 1) for heads in KEY_HEADS)
    faster = {heads: median(taken[8] / taken[heads]) for heads in KEY_HEADS}
    rate = {heads: TEXTS / np.median(taken[heads]) for heads in KEY_HEADS}
    rows = [
        [f"{heads}", f"{size[heads] / MIB:.1f}", f"{rate[heads]:,.0f}", f"{times:.2f} ± {error:.2f}"]
        for heads, (times, error) in faster.items()
    ]
    return Finding(
        checks=[
            Check(
                "logits one by one, apart from one pass",
                _stepped(given),
                0,
                1e-3,
                "1e-3 at most",
                premise=True,
            ),
            Check("bytes of the cache: largest departure from proportion", uneven, 0, 0, "0 exactly"),
            Check("tokens a second, 1 key head over 8", faster[1][0], 1, 8, "1 to 8", faster[1][1]),
        ],
        tables=[Table("Decoding", ["key heads", "cache (MiB)", "tokens a second", "over 8 key heads"], rows)],
        figures=[_draw_grouped(size, rate)],
    ) + ablations.grouped(given)


PART = "V · What it costs"
EXPERIMENTS = [
    Experiment(12, PART, r"n^2 d \text{ operations}, \; n^2 \text{ numbers}", plain),
    Experiment(13, PART, r"n^2 \to n^2 / M", fused),
    Experiment(
        14,
        PART,
        r"\text{numbers in the cache} = 2 \, n \, d \, n_\text{key heads}",
        grouped,
        ablations.GROUPS,
    ),
]


def _inputs(generator: torch.Generator, n: int, d: int) -> list[Tensor]:
    """Queries, keys and values of one head."""
    return [torch.randn(1, 1, n, d, generator=generator) for _ in range(3)]


def _pass(backend: str, inputs: Sequence[Tensor], backward: bool = False, **options: Any) -> list[Tensor]:
    """The output, and the gradients of half its square."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    with torch.set_grad_enabled(backward):
        out, _ = BACKENDS[backend](*leaves, scale=inputs[0].size(-1) ** -0.5, **options)
    return [out, *(torch.autograd.grad(out, leaves, out.detach()) if backward else ())]


def _meter(backend: str, inputs: Sequence[Tensor], backward: bool = False, **options: Any) -> Meter:
    with Meter(watched=inputs[1:]) as meter:
        _pass(backend, inputs, backward, **options)
    return meter


def _fastest(inputs: Mapping[int, Sequence[Tensor]]) -> dict[int, float]:
    """Seconds of naive by size: what else the machine does can only add to them."""
    taken = seconds({size: partial(_pass, "naive", each) for size, each in inputs.items()}, ROUNDS)
    return {size: float(times.min()) for size, times in taken.items()}


def _power(what: str, costs: Mapping[int, float], claimed: float, within: float) -> Check:
    found, error = exponent(costs)
    return Check(what, found, claimed - within, claimed + within, f"{claimed} ± {within}", error)


def _agrees(backend: str, inputs: Sequence[Tensor]) -> Check:
    exact = _pass("naive", [x.double() for x in inputs], backward=True)
    pairs = zip(_pass(backend, inputs, backward=True), exact, strict=True)
    apart = max(((x - y).abs().max() / y.abs().max().clamp(min=1)).item() for x, y in pairs)
    return Check(f"{backend}: difference from naive in float64", apart, 0, 1e-5, "1e-5 at most", premise=True)


def _operations_a_pair(inputs: Sequence[Tensor], backward: bool) -> float:
    """Of blocks over naive."""
    n, each = inputs[0].size(2), {}
    scored = sum((i.stop - i.start) * (j.stop - j.start) for i, j in blocks.row_blocks(n, n, None))
    for backend, pairs in (("blocks", scored), ("naive", n**2)):
        with FlopCounterMode(display=False) as counter:
            _pass(backend, inputs, backward)
        each[backend] = counter.get_total_flops() / pairs
    return each["blocks"] / each["naive"]


def _decode(generator: torch.Generator) -> tuple[dict[int, int], dict[int, np.ndarray]]:
    """By key heads: bytes of the cache, and seconds a token of all texts."""
    size, runs, token_B1 = {}, {}, torch.zeros(TEXTS, 1, dtype=torch.long)
    for heads in KEY_HEADS:
        config = Model(n_layer=1, n_head=8, n_kv_head=heads, d_model=8 * D, context_length=CONTEXT + SPARE)
        model, cache = GPT(config, 256, generator), KVCache(config, TEXTS)
        for layer in cache.layers:
            layer.extend(*torch.randn(2, TEXTS, heads, CONTEXT, D, generator=generator))
        size[heads] = sum(x.nbytes for x in cache.layers for x in vars(x).values() if isinstance(x, Tensor))
        runs[heads] = torch.no_grad()(partial(model, token_B1, cache))
    return size, seconds(runs, 5 * ROUNDS)


def _stepped(given: Given) -> float:
    """Largest difference of logits."""
    model = untrained.model(given, 0, n_head=8, n_kv_head=2)
    tokens_1T = torch.randperm(untrained.TOKENS, generator=given.generator())[None, : untrained.CONTEXT]
    cache = KVCache(model.config)
    with model.reading():
        steps = torch.cat([model(token_11, cache) for token_11 in tokens_1T.split(1, dim=1)], dim=1)
        return (steps - model(tokens_1T)).abs().max().item()


def _draw_plain(
    bytes_n: dict[int, int], bytes_d: dict[int, int], time_d: dict[int, float], fitted_d: dict[int, float]
) -> Figure:
    figure, (left, right) = panels(2)
    left.loglog([*bytes_n], [x / MIB for x in bytes_n.values()], "o", color=BLUE)
    left.loglog(LENGTHS, [3 * 4 * n**2 / MIB for n in LENGTHS], color=GREY, zorder=0)
    left.text(LENGTHS[2] * 1.15, 40, "3 matrices of n² numbers", color=GREY)
    left.set(xlabel="tokens n", ylabel="memory of one head (MiB)")
    for costs, colour, name in ((time_d, RED, "seconds, n = 512"), (bytes_d, BLUE, "bytes, n = 2,048")):
        right.loglog([*costs], [x / costs[16] for x in costs.values()], "o", color=colour, label=name)
    right.loglog(WIDTHS, [x / time_d[16] for x in fitted_d.values()], color=RED, zorder=0)
    right.loglog(WIDTHS, [d / 16 for d in WIDTHS], color=GREY, zorder=0, label="proportional to d")
    right.set(xlabel="width of the head d", ylabel="cost over that of d = 16")
    right.legend(frameon=False)
    _name_sizes(left, LENGTHS)
    _name_sizes(right, [16, 64, 256, 1024, 4096])
    return figure


def _draw_fused(peaks: dict[str, dict[int, int]], reads: dict[int, int]) -> Figure:
    figure, (left, right) = panels(2)
    for backend, colour, power in (("naive", RED, 2), ("blocks", BLUE, 1), ("sdpa", GREEN, 1)):
        costs, last = peaks[backend], LENGTHS[-1]
        left.loglog([*costs], [x / MIB for x in costs.values()], "o", color=colour)
        left.loglog([*costs], [costs[last] / MIB * (n / last) ** power for n in costs], color=GREY, zorder=0)
        left.text(last * 1.15, costs[last] / MIB, backend, color=colour, va="center")
    left.set(xlabel="tokens n", ylabel="memory, forward and backward (MiB)", xlim=(900, 15000))
    right.loglog(ROWS, [x / MIB for x in reads.values()], "o", color=BLUE)
    right.loglog(ROWS, [LONG**2 * D * 4 / rows / MIB for rows in ROWS], color=GREY, zorder=0)
    right.text(ROWS[2] * 1.15, 150, "n² d / M numbers", color=GREY)
    right.set(xlabel="rows of a block M", ylabel="keys and values read (MiB)", ylim=(10, 1000))
    _name_sizes(left, LENGTHS[1:])
    _name_sizes(right, ROWS)
    return figure


def _draw_grouped(size: dict[int, int], rate: dict[int, float]) -> Figure:
    figure, (axes,) = panels()
    x, y = [size[heads] / MIB for heads in KEY_HEADS], [TEXTS / rate[heads] * 1e3 for heads in KEY_HEADS]
    axes.plot(x, y, "o", color=BLUE)
    axes.plot([0, x[-1]], [0, y[-1]], color=GREY, zorder=0)
    for heads, at in zip(KEY_HEADS, zip(x, y, strict=True), strict=True):
        axes.annotate(f"{heads}", at, (0, 8), textcoords="offset points", ha="center", color=BLUE)
    axes.text(x[2] * 1.1, y[-1] * x[2] / x[-1], "proportional to bytes", color=GREY, va="top")
    axes.set(xlabel="KV cache with 1, 2, 4 and 8 key heads (MiB)", ylabel="time of a token (ms)")
    axes.set(xlim=(0, None), ylim=(0, None))
    return figure


def _name_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
