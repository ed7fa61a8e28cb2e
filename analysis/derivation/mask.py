"""The mask: what to fill it with, what a row that sees nothing becomes, and who finds a NaN."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from analysis.capture import observe
from analysis.derivation.drawing import BLUE, GREY, RED, panels
from analysis.derivation.finding import Check, Experiment, Finding, Given, Table, near
from configs.schema import Model
from model.attention import Observation
from model.backends import BACKENDS, naive
from model.transformer import GPT

S = 8  # keys; of a text without padding row 3 is looked at, and of one with padding row 4, which sees nothing
ROWS = {"some": (3, torch.zeros(1, S).long()), "all": (4, torch.tensor([[0, 0, 0, 0, -1, -1, 0, 0]]))}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FILLS = {"-inf": -math.inf, "-1e9": -1e9, "smallest": None}  # None: of the dtype
L, T, BAD, HEAD = 4, 256, 192, 2  # layers, tokens; the place and the head that get a NaN
TENSORS = ("W_q.weight", "W_k.weight", "W_v.weight", "heads", "W_o.weight")  # of an attention
Hidden = dict[str, Tensor]  # weights of a row on what is hidden from it, and gradients by q, k and v there


def masks(given: Given) -> Finding:
    """The mask is filled with -inf. -1e9 becomes -inf in fp16 but stays finite in bf16, where a row with
    everything masked then gives NaN, and the NaN poisons the whole network through the residual stream.

    Method: scores are masked where `naive.scores` masks them, with -inf, -1e9 or the dtype's smallest number,
    by `masked_fill` or by adding it; ours skips what a query does not see (`segment`), on every backend.
    Values are one-hot, so outputs are weights. Gradients are those of a row's output by q, k and v of what is
    hidden from it. Then one head in the first of four layers of a GPT gets the NaN that such a row has.

    Expected: the softmax subtracts the largest score. A row of one and the same finite number has equal
    weights, 1/n; in a row of -inf, -inf - (-inf) is NaN (closed form). The text has it the other way round.
    """
    ways: dict[str, Callable] = {
        f"{name}, {how}": partial(_filled, fill=fill, added=how == "added")
        for (name, fill), how in product(FILLS.items(), ("filled", "added"))
    }
    ways |= {f"skipped, {name}": attend for name, attend in BACKENDS.items()}
    cells = {
        (way, row, name): _hidden(attend, dtype, *ROWS[row])
        for (way, attend), row, (name, dtype) in product(ways.items(), ROWS, DTYPES.items())
    }
    filled, bare = cells["-1e9, filled", "all", "bf16"], cells["-inf, filled", "all", "bf16"]
    nan = [cell["weights"].isnan().double().mean().item() for cell in (filled, bare)]
    in_fp16, in_bf16 = (torch.tensor(-1e9, dtype=DTYPES[name]).item() for name in ("fp16", "bf16"))
    taken = float(bool(cells["-1e9, filled", "some", "fp16"]))
    bad_LT = {name: _poisoned(given, name, plant=True) for name in BACKENDS}
    count = {name: int(bad[-1].sum()) for name, bad in bad_LT.items()}
    padded = sum(int(_poisoned(given, name, plant=False).sum()) for name in BACKENDS)
    usual = _largest(cells[f"-inf, {how}", "some", x] for how, x in product(("filled", "added"), DTYPES))
    ours = _largest(cells[f"skipped, {way}", "all", name] for way, name in product(BACKENDS, DTYPES))
    of_nan = "all keys hidden, bf16: share of weights that are NaN"
    checks = [
        Check("-inf, some keys hidden: largest weight on them or gradient by them", usual, 0, 0, "0"),
        Check("-1e9 as a number of fp16", in_fp16, -math.inf, -math.inf, "-inf"),
        Check("fp16: masked_fill takes -1e9 (1) or refuses it (0)", taken, 1, 1, "1"),
        Check("-1e9 as a number of bf16", in_bf16, *near(-1e9, 0.4)),  # of 8 bits,
        Check(f"filled with -1e9, {of_nan}", nan[0], 1, 1, "1"),
        Check(f"filled with -inf, {of_nan}", nan[1], 0, 0, "0: only -1e9 is blamed"),
        Check(f"sdpa, a NaN in one of {T} tokens: how many are NaN in the end", count["sdpa"], T, T, "all"),
        Check("ours, all keys hidden: largest weight or gradient", ours, 0, 0, "0", premise=True),
        Check("ours, padded text: outputs of layers that are NaN", padded, 0, 0, "0", premise=True),
    ]
    checks += [
        Check(f"{x}: pairs that the mask gets wrong", _misplaced(given, x), 0, 0, "0", premise=True)
        for x in BACKENDS
    ]
    others = _text(_hidden(ways["-inf, filled"], DTYPES["bf16"], ROWS["some"][0], ROWS["all"][1]))
    spread = ", ".join(f"{n} ({name})" for name, n in count.items())
    says = [
        f"A row whose keys are all hidden has weights and gradients `{_text(filled)}` with -1e9 in bf16, and "
        f"`{_text(bare)}` with -inf. In the text's n·exp(-1e9 - max) the maximum is -1e9, so the sum is n: "
        "the row reads what it must not, and no NaN tells.",
        f"With -inf, even a loss that reads only another row, which sees something, has `{others}`: 0 times "
        f"NaN is NaN. So a NaN in one row of one head came, three layers on, to {spread} of {T} rows, "
        "those of earlier tokens too: a mask holds back finite numbers only.",
    ]
    columns = ["", *(f"{row} hidden, {name}" for row, name in product(ROWS, DTYPES))]
    rows = [[way, *(_text(cells[way, row, name]) for row, name in product(ROWS, DTYPES))] for way in ways]
    table = Table("Largest weight on what is hidden; which of its q, k and v get a gradient", columns, rows)
    return Finding(checks, says, [_draw_spread(bad_LT)], [table])


def _draw_spread(bad_LT: dict[str, Tensor]) -> Figure:
    """Which rows are NaN after each layer, by backend."""
    figure, drawn = panels(2, sharey=True)
    for axes, name in zip(drawn, ("sdpa", "blocks"), strict=True):
        colours = ListedColormap(["#eeeeee", RED])
        axes.imshow(bad_LT[name].numpy(), colours, aspect="auto", origin="lower", interpolation="none")
        axes.set_title(f"{name}: rows that are NaN (red)", loc="left", fontsize=10)
        axes.set(xlabel="place in the text", yticks=range(L))
    drawn[0].set_ylabel("after layer")
    return figure


def _filled(q: Tensor, k: Tensor, v: Tensor, fill: float | None, added: bool, **options: Any) -> Any:
    hidden, s = naive.scores(q, k, **options) == -naive.INF, options["scale"] * (q @ k.mT)
    fill = torch.finfo(s.dtype).min if fill is None else fill
    s = s + torch.tensor(fill, dtype=s.dtype).where(hidden, 0) if added else s.masked_fill(hidden, fill)
    return s.softmax(-1) @ v, None


def _hidden(attend: Callable, dtype: torch.dtype, row: int, segment_BS: Tensor) -> Hidden:
    """Of one row; empty where PyTorch refuses the fill."""
    q, k = (torch.arange(S * S).mul(x).sin().view(1, 1, S, S).to(dtype).requires_grad_() for x in (0.7, 1.3))
    v = torch.eye(S, dtype=dtype)[None, None].requires_grad_()
    try:
        out_S = attend(q, k, v, scale=S**-0.5, segment=segment_BS)[0][0, 0, row]
    except RuntimeError:
        return {}
    (out_S @ torch.arange(S, dtype=dtype)).backward()
    places = slice(0 if segment_BS[0, row] < 0 else row + 1, None)
    found = {"weights": out_S.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    return {
        name: x[..., places, :] if x.dim() > 1 else x[places] for name, x in found.items() if x is not None
    }


def _largest(cells: Any) -> float:
    """Of all numbers in size; NaN where one is."""
    return torch.stack([x.abs().max().float() for cell in cells for x in cell.values()]).max().item()


def _text(cell: Hidden) -> str:
    if not cell:
        return "refused"
    weights, *gradients = cell.values()
    equal = ((weights - 1 / S).abs() < 1e-3).all()
    nan, into = (
        [name for name, gradient in zip("qkv", gradients, strict=True) if kind(gradient).any()]
        for kind in (torch.isnan, torch.abs)
    )
    backward = f"NaN in {', '.join(nan)}" if nan else f"into {', '.join(into)}" if into else "0"
    forward = f"1/{S}" if equal else f"{weights.max().item():g}".replace("nan", "NaN")
    return f"{forward}; {backward}"


def _misplaced(given: Given, backend: str) -> int:
    """Pairs of query and key where a gradient passes, by key or value, and must not, or the reverse."""
    q, k, v = torch.randn(3, 1, 1, S, S, generator=given.generator())
    rows: Callable = lambda k, v: BACKENDS[backend](q, k, v, scale=1.0)[0][0, 0].sum(-1)  # noqa: E731
    by_k, by_v = torch.autograd.functional.jacobian(rows, (k, v))
    seen_TS = (by_k[:, 0, 0].abs() + by_v[:, 0, 0].abs()).sum(-1) != 0
    return int((seen_TS != torch.ones(S, S).tril().bool()).sum())


def _gpt(given: Given, backend: Any = "auto") -> GPT:
    config = Model(n_layer=L, n_head=4, d_model=32, context_length=T, backend=backend)
    return GPT(config, T, given.generator()).eval()


def _plant(model: GPT, tensor: str, layer: int, row: int = 0) -> None:
    """A NaN in a tensor of an attention, where it belongs to one head; `row` of what the heads give."""
    attention = model.attentions()[layer]
    at = HEAD * attention.d_head
    if tensor != "heads":
        attention.get_parameter(tensor).data[(0, at) if "W_o" in tensor else (at, 0)] = math.nan
        return
    mark_TC = torch.zeros(T, attention.W_o.in_features)
    mark_TC[row, at] = math.nan
    attention.heads.register_forward_hook(lambda _, inputs, out: out + mark_TC)


@torch.no_grad()
def _poisoned(given: Given, backend: str, plant: bool) -> Tensor:
    """Which rows are NaN after each layer, L x T: with a NaN planted, or else with padding."""
    model, bad = _gpt(given, backend), list[Tensor]()
    if plant:
        _plant(model, "heads", layer=0, row=BAD)
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, x_BTC: bad.append(x_BTC[0].isnan().any(-1)))
    padding_BT = (torch.arange(T) >= BAD)[None].long().neg()
    model(torch.arange(T)[None], segment_BT=None if plant else padding_BT)
    return torch.stack(bad)


def guards(given: Given) -> Finding:
    """`assert torch.isfinite(attn).all()` finds the layer in which a NaN arises.

    Method: a NaN is planted in one head of each layer of a GPT: in a weight of W_q, W_k, W_v or W_o, or in
    what the head gives. Asked are the assertion, on the attention weights of one layer after another, and the
    guard of our training loop, which looks at each parameter and output in the order of their use. That the
    guard finds all of them is the premise.

    Expected: all of them (the text). But attention weights hold what comes by queries and keys; what comes by
    values or W_o is in the weights of the next layer only, and of none if the layer was the last.
    """
    tokens_BT, asserted, told = torch.arange(T)[None], dict[tuple[str, int], int | None](), {}
    for tensor, layer in product(TENSORS, range(L)):
        model = _gpt(given)
        _plant(model, tensor, layer)
        # As the guard asks for it, not now: what it watches is this very pass.
        losses = (F.cross_entropy(model(x_BT)[0], x_BT[0]) for x_BT in [tokens_BT])
        asserted[tensor, layer] = _asserted(model, tokens_BT)
        told[tensor, layer] = given.find_nonfinite(model, losses, math.nan)
    right = {x: [asserted[x, layer] == layer for layer in range(L)] for x in TENSORS}
    guard = {
        "layer": [f"layer {layer}, " in words for (_, layer), words in told.items()],
        "tensor": [f"attention.{x}" in words for (x, _), words in told.items()],
        "head": [words.endswith(f"head {HEAD}") for words in told.values()],
    }
    checks = [
        Check(f"NaN in {x}: share of {L} layers that the assertion names", sum(hits) / L, 1, 1, "1")
        for x, hits in right.items()
    ]
    for what, hits in guard.items():
        share = sum(hits) / len(told)
        checks.append(Check(f"share of NaN whose {what} our guard names", share, 1, 1, "1", premise=True))
    found, found_right = [*asserted.values()], sum(map(sum, right.values()))
    says = [
        f"The assertion names the layer of {found_right} of {len(found)} NaN; {found.count(None)} it misses.",
        f"Our guard says of a NaN in W_v: `{told['W_v.weight', 1]}`; "
        f"and in what a head gives: `{told['heads', 1]}`.",
    ]
    figure, (axes,) = panels()
    for (tensor, layer), seen in asserted.items():
        word, colour = (str(seen), BLUE if seen == layer else RED) if seen is not None else ("none", GREY)
        axes.text(layer, TENSORS.index(tensor), word, color=colour, size=14, ha="center", va="center")
    axes.set(xlim=(-0.5, L - 0.5), ylim=(len(TENSORS) - 0.5, -0.5), xticks=range(L))
    axes.set_yticks(range(len(TENSORS)), [tensor.removesuffix(".weight") for tensor in TENSORS])
    axes.set(xlabel="layer with the NaN", ylabel="planted in")
    axes.set_title("layer that the assertion names", loc="left", fontsize=10)
    return Finding(checks, says, [figure])


def _asserted(model: GPT, tokens_BT: Tensor) -> int | None:
    """The first layer whose attention weights are not finite."""
    found = list[int]()

    def look(seen: Observation) -> None:
        A_BHTS, _ = naive.softmax(naive.scores(seen.q_BHTD, seen.k_BGSD, seen.scale))
        found.extend([] if A_BHTS.isfinite().all() else [seen.layer])

    with model.reading(), observe(model, look):
        model(tokens_BT)
    return found[0] if found else None


PART = "III · The mask"
EXPERIMENTS = [
    Experiment(7, PART, r"\operatorname{softmax}(s + m), \quad m_{ij} = -\infty \text{ where } j > i", masks),
    Experiment(8, PART, r"|A_{ij}| < \infty \quad \text{for all } i, j", guards),
]
