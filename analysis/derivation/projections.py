"""I · Before there are Q, K and V: scores without direction, and one vector for two purposes."""

import math

import torch
from torch import Tensor

from analysis.derivation import ablations, untrained
from analysis.derivation.drawing import BLUE, GREEN, GREY, RED, panels
from analysis.derivation.finding import Experiment, Finding, Given, Table, near
from analysis.derivation.intervals import checked
from model.attention import CausalSelfAttention

PART = "I · Before there are Q, K and V"
WIDTH, HEADS, SEQUENCES = 128, 4, 16
SCORES = {"identity": "x_i·x_j", "tied": "W_k = W_q", "separate": "W_k ≠ W_q"}  # by model.qk
PLACES = {  # model.position, and whether queries and keys are turned
    "learned positions": ("learned", False),
    "rotary, not turned": ("rotary", False),
    "rotary positions": ("rotary", True),
}


def symmetry(given: Given) -> Finding:
    """Dot products x_i·x_j are an attention that works without a single learned number, but a symmetric one:
    i gives j the score that j gives i. Different projections W_q ≠ W_k break that; language needs direction.

    Method: all pairs of queries and keys, also those that the mask hides, as they enter the kernel of our
    attention at its initialisation, with `model.qk` identity, tied and separate; with learned positions and
    with rotary ones, turned or not. Eight models of four heads, sixteen sequences of 16 different tokens. The
    asymmetry of their scores S is |S - Sᵀ| / |S|. Exchange: what the score of the last token for the first
    changes by when these two change places, relative as well.

    Expected: without separate projections S is symmetric but for rounding, turned or not, since query i and
    key i are turned alike: (R_i q_i)·(R_j q_j). With them S_ij and S_ji of random tokens have nothing in
    common: √2 · √((1 - 1/16)(1 - 1/128)) (closed form).
    """
    found = {(qk, place): _asymmetry(given, qk, place) for qk in SCORES for place in PLACES}
    apart = near(math.sqrt(2 * (1 - SEQUENCES / untrained.TOKENS) * (1 - 1 / WIDTH)), 3)
    checks, rows = [], []
    for (qk, place), both_R2 in found.items():
        expected = apart if qk == "separate" else (0.0, 1e-5, "0 but for rounding")
        checks.append(checked(f"asymmetry, {SCORES[qk]}, {place}", both_R2[:, 0], *expected))
        rows.append([SCORES[qk], place, *(f"{x:.2f}" for x in both_R2.mean(0))])
    table = Table("Means of eight models", ["scores", "positions", "asymmetry", "change by exchange"], rows)
    figure, (left, right) = panels(2)
    for (qk, label), colour in zip(SCORES.items(), (BLUE, GREEN, RED), strict=True):
        S_BHTT = _scores(given, 0, qk, "rotary positions", _tokens(given.generator()))
        i, j = torch.tril_indices(S_BHTT.size(2), S_BHTT.size(3), offset=-1)
        left.plot(S_BHTT[:4, 0, i, j].flatten(), S_BHTT[:4, 0, j, i].flatten(), ".", color=colour)
        right.plot([found[qk, place][:, 1].mean() for place in PLACES], "o", color=colour, label=label)
    left.set(xlabel="score of i for j", ylabel="score of j for i")
    right.axhline(math.sqrt(2), color=GREY, lw=1, zorder=0, label="√2: nothing in common")
    right.set_xticks(range(3), [place.replace(" ", "\n", 1) for place in PLACES])
    right.set(xlim=(-0.5, 2.5), ylim=(-0.1, 2.3), ylabel="change of the score by exchange")
    right.legend(frameon=False, ncols=2)
    learned, neither, rotary = (found["tied", place].mean(0).tolist() for place in PLACES)
    says = [
        f"With rotary positions the scores of tied projections have an asymmetry of {rotary[0]:.2f}: query i "
        f"and key i are turned alike. A direction may show when two tokens change places: their score "
        f"changes by {rotary[1]:.2f} of itself with rotary positions, {learned[1]:.2f} with learned ones, "
        f"{neither[1]:.2f} with neither.",
        "Under a causal mask only one of S_ij and S_ji is used; what exchange changes is what a model can "
        "tell of the order there.",
    ]
    return Finding(checks, says, [figure], [table]) + ablations.directions(given)


def scored_and_carried(given: Given) -> Finding:
    """Being found and handing something over are two tasks, and one vector for both presses two subspaces
    into one: a third projection, W_v, is for what is carried.

    Method: a head finds a token by what W_k reads of it and takes from it what W_v reads; the overlap of the
    two subspaces is the mean squared cosine of the angles between them. From the matrices of our attention at
    its initialisation, at width 128, with `model.value` project and key, eight models of four heads for each
    d_head; and of trained models. What values of their own are worth is measured by training without them.

    Expected: an overlap of 1 where values are keys, of d_head / 128 where they have a random projection of
    their own (closed form); a higher loss without W_v.
    """
    widths = [8, 16, 32, 64, 128]
    checks = []
    figure, [axes] = panels(subplot_kw={"xlabel": "d_head", "ylabel": "overlap of W_k and W_v"})
    for value, colour, label in (("key", BLUE, "values are keys"), ("project", RED, "W_v of their own")):
        keys = {"n_head": HEADS, "d_model": WIDTH, "value": value}
        found_RW = torch.tensor(
            [
                [_overlap(untrained.model(given, r, d_head=d, **keys).attentions()) for d in widths]
                for r in range(untrained.REPETITIONS)
            ]
        )
        axes.plot(widths, found_RW.mean(0), "o", color=colour, label=label)
        expected = 1.0 if value == "key" else 32 / WIDTH
        what, overlap_R = f"overlap at d_head = 32, {label}", found_RW[:, widths.index(32)]
        checks.append(checked(what, overlap_R, *near(expected, 5), premise=True))
    axes.plot(widths, [d / WIDTH for d in widths], color=GREY, lw=1, zorder=0, label="d_head / 128")
    axes.legend(frameon=False)
    says = []
    for subject in given.subjects:
        attentions = subject.model.attentions()
        chance = attentions[0].d_head / subject.model.config.d_model
        says.append(f"{subject.name}: overlap {_overlap(attentions):.2f}, by chance {chance:.2f}.")
    return Finding(checks, says, [figure]) + ablations.carried(given)


def _asymmetry(given: Given, qk: str, place: str) -> Tensor:
    """Of the scores of each model against their transpose, and against those of exchanged tokens: R x 2."""
    generator, found = given.generator(), []
    for repetition in range(untrained.REPETITIONS):
        tokens_BT = _tokens(generator)
        S_BHTT = _scores(given, repetition, qk, place, tokens_BT)
        exchanged_BHTT = _scores(given, repetition, qk, place, tokens_BT.flip(1))
        pairs = (S_BHTT, S_BHTT.mT), (S_BHTT[..., -1, 0], exchanged_BHTT[..., -1, 0])
        found.append(torch.stack([(a - b).norm() / a.norm() for a, b in pairs]))
    return torch.stack(found)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randperm(untrained.TOKENS, generator=generator).view(SEQUENCES, -1)


def _scores(given: Given, repetition: int, qk: str, place: str, tokens_BT: Tensor) -> Tensor:
    """Of all pairs, before the mask: B x H x T x T."""
    position, turned = PLACES[place]
    gpt = untrained.model(given, repetition, n_head=HEADS, d_model=WIDTH, qk=qk, position=position)
    [attention] = gpt.attentions()
    attention.rotary = attention.rotary if turned else None
    with gpt.reading():
        seen, _ = untrained.run(gpt, tokens_BT)
    return seen.scale * (seen.q_BHTD @ seen.k_BGSD.mT)


def _overlap(attentions: list[CausalSelfAttention]) -> float:
    """Mean squared cosine of the angles between the row spaces of `W_k` and `W_v`, over all heads."""
    found = []
    for attention in attentions:
        _, W_k, W_v, _ = attention.matrices()
        k_HCD, v_HCD = (torch.linalg.qr(W.mT)[0] for W in (W_k, W_v))
        found.append((k_HCD.mT @ v_HCD).square().sum((1, 2)).mean() / k_HCD.size(-1))
    return torch.stack(found).mean().item()


EXPERIMENTS = [
    Experiment(1, PART, r"x_i \cdot x_j = x_j \cdot x_i", symmetry, ablations.DIRECTIONS),
    Experiment(
        2, PART, r"y_i = \sum_j \mathrm{softmax}_j(s_{ij})\, W_V x_j", scored_and_carried, ablations.VALUES
    ),
]
