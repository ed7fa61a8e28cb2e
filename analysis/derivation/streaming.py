"""Text without end through a cache that rolls, its first entries kept or dropped: a part of row 11."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analysis.derivation.drawing import BLUE, GREEN, GREY, RED, YELLOW, panels
from analysis.derivation.finding import Check, Finding, Given, Subject, Table
from analysis.derivation.intervals import mean
from analysis.probes import Probe, look, token_losses
from configs.screen import looks
from model.cache import KVCache, LayerCache
from model.transformer import GPT

WINDOW = 256  # tokens, or what fits into the context beside the kept ones
KEPT = (0, 1, 4)  # of the first entries
LENGTH = 14  # windows in a text
TOKENS = 2 * LENGTH * WINDOW  # of all texts together
STRONG = 0.3  # mean weight on the first token: what makes a head a sink in Gu et al. 2024 (2410.10781)
DENSE, DROPPED, ONE, FOUR, ANEW = NAMES = "dense", "none kept", "one kept", "four kept", "window read anew"
LOOKS: dict[str, dict[str, Any]] = {
    DENSE: {"color": GREY},
    DROPPED: {"color": RED},
    FOUR: {"color": BLUE, "linewidth": 3, "alpha": 0.5},
    ONE: {"color": YELLOW, "linestyle": "--"},
    ANEW: {"color": GREEN, "linestyle": "", "marker": "."},
}


def streaming(given: Given) -> Finding:
    """Loss far past the window, with the first entries of the cache kept and dropped, of each subject.

    Dropping what heads rest on must cost, and keeping it must make up for all that lies beyond the window.
    """
    if not given.subjects:
        command = "`python -m scripts.derive --model FILE.gguf`"
        return Finding(missing=[f"loss far past the window, first entries kept or dropped: {command}"])
    return sum(map(_stream, given.subjects), Finding())


def _stream(subject: Subject) -> Finding:
    config = subject.model.config
    if config.position == "learned" or config.window is not None:
        return Finding(missing=[f"streaming on {subject.name}: needs rotary positions and no model.window"])
    w = min(WINDOW, config.context_length - max(KEPT))
    length = LENGTH * w
    if (B := min(TOKENS, len(subject.text_N)) // length) == 0:
        return Finding(missing=[f"streaming on {subject.name}: needs a text of {length:,} tokens"])
    text_BT = subject.text_N[: B * length].view(B, length).to(subject.model.device, copy=True)
    if subject.bos is not None:
        text_BT[:, 0] = subject.bos
    sink = look(subject.model, "text", Probe(text_BT[:, :w]), losses=False).scores["sink"].mean().item()
    return judge(subject, w, sink, losses(subject.model, text_BT, w, subject.bos))


def losses(model: GPT, text_BT: Tensor, w: int, bos: int | None) -> dict[str, Tensor]:
    """Of each next token, B x (T - 1) by `NAMES`; NaN where it was not measured.

    All caches that roll have as many places, `w` and four, and take a batch together: the weights, whose
    reading is most of the work, are read once for all. Read anew are `w` tokens on average, behind BOS.
    """
    B, T = text_BT.shape
    # The same weights, and rotary tables for all of the text.
    long = GPT(model.config.model_copy(update={"context_length": T}), len(model.token_embedding.weight))
    long.to(model.device).load_state_dict(model.state_dict(), assign=True)
    places, counted, thrice_BT = w + max(KEPT), w // 4, text_BT.repeat(len(KEPT), 1)
    caches = [KVCache(long.config, B, long.device, window=places - n, n_sink=n) for n in KEPT]
    pieces = caches[0].pieces(thrice_BT)
    abreast = copy(caches[0])
    abreast.layers = [Abreast(*layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    starts = range(2 * w, T - counted, 2 * counted)
    steps = LENGTH + len(pieces) + len(starts)
    bar = tqdm(
        total=steps, desc="streaming", unit=" steps", **looks("streaming: {n_fmt} of {total_fmt} steps")
    )
    with long.reading(), bar:
        dense_BT = _read(long, text_BT.split(w, dim=1), KVCache(long.config, B, long.device), bar)
        rolled_BT = _read(long, pieces, abreast, bar)
        anew_BT = torch.full_like(dense_BT, math.nan)
        for start in starts:
            read_BT = text_BT[:, start - w + counted // 2 : start + counted + 1]
            if bos is not None:
                read_BT = torch.cat([torch.full_like(read_BT[:, :1], bos), read_BT], dim=1)
            x_BTC, last = long.hidden(read_BT), slice(-counted - 1, None)
            anew_BT[:, start : start + counted] = token_losses(long, x_BTC[:, last], read_BT[:, last])
            bar.update()
    return dict(zip(NAMES, [dense_BT, *rolled_BT.chunk(len(KEPT)), anew_BT], strict=True))


def _read(model: GPT, pieces: Sequence[Tensor], cache: KVCache, bar: tqdm) -> Tensor:
    states = []
    for piece_BT in pieces:
        states.append(model.hidden(piece_BT, cache))
        bar.update()
    return token_losses(model, torch.cat(states, dim=1), torch.cat([*pieces], dim=1))


class Abreast(LayerCache):
    """One layer of caches with as many places each, whose sequences share a batch."""

    def __init__(self, *layers: LayerCache):
        self.layers, self.rolls, self.length = layers, True, 0

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Each adds its own."""
        n = len(self.layers)
        new = zip(self.layers, k_BGTD.chunk(n), v_BGTD.chunk(n), strict=True)
        keys, values = zip(*(layer.extend(k, v) for layer, k, v in new), strict=True)
        return torch.cat(keys), torch.cat(values)


# What they come to


def judge(subject: Subject, w: int, sink: float, losses: dict[str, Tensor]) -> Finding:
    """Of `losses` and the mean weight of all heads on the first token: checks only where that is strong."""
    pairs = ((DROPPED, FOUR), (ONE, FOUR), (FOUR, DENSE), (FOUR, ANEW))
    drop, one, dense, anew = found = [_beyond(losses[a] - losses[b], w) for a, b in pairs]
    name, context, (B, T) = subject.name, subject.model.config.context_length, losses[DENSE].shape
    checks = [
        Check(f"{name}: nats lost without the first entries", drop[0], 0.4, math.inf, "0.4 or more", drop[1])
    ]
    controls = [("the window read anew", 0.03, anew), ("dense attention", 0.08, dense)]
    for what, most, (more, error) in controls[: 2 if context >= T else 1]:
        limit = f"{most} at most"
        checks.append(Check(f"{name}: nats of four kept above {what}", more, -math.inf, most, limit, error))
    says = [
        f"{name}: heads put {sink:.2f} of their weight on the first token. A cache of {w + 4} places "
        f"without it costs {drop[0]:.3f} ± {drop[1]:.3f} nats a token; one kept entry in place of four costs "
        f"{one[0]:.3f} ± {one[1]:.3f}."
    ]
    if sink < STRONG:
        says.append(f"{name}: heads rest there too little (below {STRONG}) to test the statement.")
    if context < T:
        says.append(
            f"{name}: dense attention past its {context} places meets distances that it was not trained on, "
            f"and is {-dense[0]:.3f} ± {dense[1]:.3f} nats worse than the cache with four kept."
        )
    cells = [
        [f"{a}, above {b}", f"{more:+.3f}", f"{error:.3f}"]
        for (a, b), (more, error) in zip(pairs, found, strict=True)
    ]
    title = f"{name}: difference in loss, tokens {2 * w:,} to {T:,} of {B} texts, {w + 4} places"
    table = Table(title, ["", "nats a token", "± (95 %)"], cells)
    return Finding([] if sink < STRONG else checks, says, [_drawn(context, w, losses)], [table])


def _beyond(difference_BT: Tensor, w: int) -> tuple[float, float]:
    """Mean past two windows and half of its 95 % interval, of blocks of `w` places: neighbours are alike."""
    blocks = difference_BT[:, 2 * w :].double().split(w, dim=1)
    return mean(torch.cat([block.nanmean(dim=1) for block in blocks]))


def _drawn(context: int, w: int, losses: dict[str, Tensor]) -> Figure:
    figure, (axes,) = panels()
    # Text is harder here and easier there: what was measured in some places stands by its paired difference.
    four = losses[FOUR].split(w, dim=1)
    for name, look_ in LOOKS.items():
        pairs = zip(losses[name].split(w, dim=1), four, strict=True)
        means = [(part - same).nanmean().item() + same.mean().item() for part, same in pairs]
        axes.plot([w * (i + 0.5) for i in range(len(means))], means, label=name, **look_)
    if context < w * len(four):
        axes.axvline(context, color=GREY, linewidth=0.8, linestyle=":", label=f"context, {context}")
    axes.set_xlabel(f"position in the text (tokens; window {w})")
    axes.set_ylabel("loss (nats a token)")
    axes.legend(frameon=False, fontsize=8)
    return figure
