"""Several heads: what they cost, what one cannot express, and at which depth kinds of heads stand."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from scipy.optimize import linprog
from torch import Tensor, nn

from analysis.derivation.drawing import COLOURS, panels
from analysis.derivation.finding import Check, Experiment, Finding, Given, Subject, Table
from analysis.derivation.intervals import checked
from analysis.heads import describe_heads, untrained
from analysis.syntax import add_syntax
from configs import UserError
from configs.schema import Model
from data.treebank import Sentence
from model.attention import CausalSelfAttention

C, T, ROWS = 16, 64, range(43, 64, 4)  # width, tokens; rows that see more than twice as many as C
HEADS, SHARPNESS, REPEATS = (1, 2, 4, 8), (0.125, 0.25, 0.5, 1, 2), 8  # SHARPNESS: of scores, their deviation
FAR = 1e-4  # from a hull of points of size 1: float32 does not get there by rounding
FEWEST = 6  # layers that have thirds worth the name
NAMES = ("first", "middle", "last")
THIRDS = {  # of the depth, from and to: where the text has a kind of heads
    "previous-token": (0, 1, "shallow"),
    "syntactic": (1, 2, "in the middle"),
    "induction": (1, 3, "in the middle or late"),
    "sink": (0, 3, "anywhere"),
}
MODEL = "`python -m scripts.derive --model FILE.gguf`"


def hulls(given: Given) -> Finding:
    """Heads cost no parameters. The output of one head stays in the convex hull of the values; several heads
    reach beyond it.

    Method: `CausalSelfAttention` of width 16 with random weights and inputs, six of its rows, which see 44 to
    64 tokens: with no more than the width hardly anything lies in a hull. Linear programming (HiGHS) tells
    how far, in the largest coordinate, an output is from the hull of u_j = sum_h W_o^h W_v^h x_j of what it
    sees, where it would be if the heads had the same weights. The scale is multiplied, for scores that
    deviate by 1/8 to 2. Eight repetitions.

    Expected: equal counts; distance 0 for one head, whose weights are positive and sum to 1; above 0 for
    several once they look at different tokens (closed form).
    """
    generator = given.generator()
    counts = {sum(p.numel() for p in _attention(H, generator).parameters()) for H in (*HEADS, 16)}
    far = {
        (H, sharp): np.array([_distances(H, sharp, generator) for _ in range(REPEATS)])
        for H in HEADS
        for sharp in SHARPNESS
    }
    share = {key: (distance_RN > FAR).mean(1) for key, distance_RN in far.items()}
    one = max(far[1, sharp].max() for sharp in SHARPNESS)
    checks = [
        Check("parameters with 1 to 16 heads, most over fewest", max(counts) / min(counts), 1, 1, "1"),
        Check("1 head: largest distance to the hull", one, 0, FAR, f"0 within {FAR:g}"),
    ]
    for H in HEADS[1:]:
        what, least = f"{H} heads: share of outputs outside, scores deviate by 1", 1 / far[H, 1].size
        checks.append(checked(what, share[H, 1], least, math.inf, "above 0"))
    little = ", ".join(f"{share[H, SHARPNESS[0]].mean():.0%} for {H} heads" for H in HEADS[1:])
    ranks = [int(torch.linalg.matrix_rank(_attention(H, generator).matrices()[2][0])) for H in HEADS]
    says = [
        f"Where scores deviate by {SHARPNESS[0]:g} only, the share outside is {little}: heads that average "
        "alike are one head. What several gain is looking at different tokens.",
        f"Each pays for it with rank: that of its W_v is {ranks} where there are {[*HEADS]} heads.",
    ]
    figure, (axes,) = panels()
    for H, colour in zip(HEADS, COLOURS, strict=False):
        means = [share[H, sharp].mean() for sharp in SHARPNESS]
        label = f"{H} heads" if H > 1 else "1 head (expected: 0)"
        axes.plot(SHARPNESS, means, "o-", color=colour, clip_on=False, label=label)
    axes.set_xscale("log", base=2)
    axes.set(xticks=SHARPNESS, xticklabels=SHARPNESS, ylim=(0, 1))
    axes.set(xlabel="standard deviation of the scores", ylabel="share of outputs outside the hull")
    axes.legend(frameon=False, loc="center right")
    return Finding(checks, says, [figure])


def _attention(H: int, generator: torch.Generator) -> CausalSelfAttention:
    config = Model(n_layer=1, n_head=H, d_model=C, context_length=T, position="learned")
    attention = CausalSelfAttention(config, layer=0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, 0, C**-0.5, generator)
    return attention


@torch.no_grad()
def _distances(H: int, sharp: float, generator: torch.Generator) -> list[float]:
    """How far each of the last outputs is from the hull of what the tokens before it would give."""
    attention, x_TC = _attention(H, generator), torch.randn(T, C, generator=generator)
    attention.scale *= sharp
    _, _, W_v, W_o = attention.matrices()
    u_TC = torch.einsum("hcd,hde,te->tc", W_o, W_v, x_TC)
    out_TC = attention(x_TC[None])[0]
    return [distance(out_TC[i], u_TC[: i + 1]) for i in ROWS]


def distance(y_C: Tensor, u_NC: Tensor) -> float:
    """Of `y` from the hull of N points: the least t such that no coordinate of y - sum a_n u_n exceeds it."""
    u_CN, y, one = u_NC.double().numpy().T, y_C.double().numpy(), np.ones((y_C.numel(), 1))
    within, weights = np.block([[u_CN, -one], [-u_CN, -one]]), [[1.0] * len(u_NC) + [0.0]]
    return linprog([0.0] * len(u_NC) + [1.0], within, np.concatenate([y, -y]), weights, [1.0]).fun


def depths(given: Given) -> Finding:
    """Positional heads, which look at the last one or two tokens, stand in shallow layers, syntactic ones in
    the middle (verbs look at subjects, prepositions at objects), induction heads in the middle and late, and
    sinks in all layers.

    Method: labels by the rules of `analysis.heads` (positional: previous-token) and, with a treebank, of
    `analysis.syntax`, counted by third of the depth; intervals as if heads were drawn at random (Wilson).

    Expected: a larger share of the heads of a kind where the text has them than of all heads, and a sink in
    each layer. But a token sees earlier ones only, and the object of an English preposition comes after it.
    """
    if not given.subjects:
        return Finding(missing=[f"heads by depth: {MODEL}"])
    finding, (figure, drawn) = Finding(), panels(len(given.subjects))
    for subject, axes in zip(given.subjects, drawn, strict=True):
        (layers, fault), L = _layers(subject), subject.model.config.n_layer
        finding += _by_third(subject, layers) + Finding(
            missing=[f"syntactic heads: {fault}"] if fault else []
        )
        for y, (kind, (first, stop, _)) in enumerate(THIRDS.items()):
            axes.barh(y, (stop - first) * L / 3, left=first * L / 3 - 0.5, color="#eeeeee")
            count = Counter(layers[kind])
            axes.scatter([*count], [y] * len(count), [20 * n for n in count.values()], COLOURS[y])
        axes.set_yticks(range(len(THIRDS)), [*THIRDS])
        axes.set(xlim=(-0.5, L - 0.5), xticks=range(0, L, 1 + L // 8), xlabel="layer (grey: by the text)")
        axes.set_title(subject.name, loc="left", fontsize=10, parse_math=False)  # a name may have $ in it
    sentences = next((subject.sentences for subject in given.subjects if subject.sentences), None)
    return finding + Finding(_prepositions(sentences) if sentences else [], figures=[figure])


def _layers(subject: Subject) -> tuple[dict[str, list[int]], str]:
    """The layer of each head of a kind, and why the treebank could not be used."""
    model, seed, fault = subject.model, subject.seed, ""
    document = describe_heads(model, subject.probes, subject.bos_trained, seed, {})
    if subject.sentences:
        asked = subject.tokenizer, subject.sentences, subject.treebank, seed
        try:
            add_syntax(document, model, untrained(model, seed), *asked)
        except UserError as error:  # the other statements do not depend on it
            fault = str(error)
    labels = [
        (head["layer"], {label.partition(":")[0] for label in head["labels"]}) for head in document["heads"]
    ]
    return {kind: [layer for layer, own in labels if kind in own] for kind in THIRDS}, fault


def _by_third(subject: Subject, layers: dict[str, list[int]]) -> Finding:
    """A table, and checks if the model is deep enough."""
    name, L, H = subject.name, subject.model.config.n_layer, subject.model.config.n_head
    third_L = [3 * layer // L for layer in range(L)]
    checks, missing = list[Check](), list[str]()
    for kind, (first, stop, where) in THIRDS.items():
        there, n = [layer for layer in layers[kind] if first <= third_L[layer] < stop], len(layers[kind])
        even = sum(first <= third < stop for third in third_L) / L
        if kind != "sink" and n and L >= FEWEST:
            checks.append(_share(f"{name}: share of {n} {kind} heads that are {where}", len(there), n, even))
    if L < FEWEST:
        missing.append(f"heads by depth: the {L} layers of {name} have no thirds to speak of; {MODEL}")
    elif subject.bos is not None:  # heads of others have no label for a sink
        checks.append(Check(f"{name}: share of layers with a sink", len({*layers["sink"]}) / L, 1, 1, "1"))
    if not subject.sentences:
        command = f"`python -m scripts.derive {subject.command} --treebank FILE.conllu`"
        missing.append(f"syntactic heads: {command}")
    columns = ["", *(f"{third} third, of {third_L.count(n) * H}" for n, third in enumerate(NAMES))]
    rows = [[kind, *(str(sum(third_L[x] == n for x in layers[kind])) for n in range(3))] for kind in THIRDS]
    bare = [layer for layer in range(L) if layer not in layers["sink"]]
    sinks = f"no sink in layers {bare}" if bare else "a sink in every layer"
    says = [f"{name}: {sinks if subject.bos is not None else 'no BOS, and so no sink by our rule'}."]
    return Finding(checks, says, tables=[Table(f"{name}, {L} layers", columns, rows)], missing=missing)


def _prepositions(sentences: Sequence[Sentence]) -> list[Check]:
    words = [(n, word) for sentence in sentences for n, word in enumerate(sentence.words)]
    arcs = [(n, word.head) for n, word in words if word.relation == "case" and word.head is not None]
    if not arcs:
        return []
    what = f"share of {len(arcs)} prepositions whose object a causal model lets them see"
    return [_share(what, sum(head < n for n, head in arcs), len(arcs), 0.5)]


def _share(what: str, k: int, n: int, low: float) -> Check:
    """Of k in n against more than `low`, with the farther end of Wilson's interval."""
    interval = stats.binomtest(k, n).proportion_ci(method="wilson")
    error = max(k / n - interval.low, interval.high - k / n)
    return Check(what, k / n, low, math.inf, f"above {low:.2f}", error)


PART = "IV · What several heads do"
EXPERIMENTS = [
    Experiment(9, PART, r"\sum_j a_j v_j, \quad a_j \ge 0, \quad \sum_j a_j = 1", hulls),
    Experiment(10, PART, r"\text{layer} \mapsto \text{kind of head}", depths),
]
