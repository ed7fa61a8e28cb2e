"""II · Where sqrt(d) comes from: the spread of dot products, and what it does to softmax and gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from analysis.derivation import ablations
from analysis.derivation.drawing import BLUE, GREEN, GREY, RED, panels
from analysis.derivation.finding import Check, Experiment, Finding, Given, Table, near
from analysis.derivation.intervals import checked, exponents
from analysis.derivation.untrained import Start, start, visible
from model.backends import naive

PART = "II · Where sqrt(d) comes from"
WIDTHS = [16, 32, 64, 128, 256, 512, 1024]  # d, or d_head
AT_128 = WIDTHS.index(128)
LOGITS = [2.0, 1.0, 0.5, 0.0]
PRINTED = {1: [0.55, 0.20, 0.12, 0.07], 11: [1.0, 0.0, 0.0, 0.0]}  # what the text says softmax gives


def standard_deviation(given: Given) -> Finding:
    """The dot product of two vectors of d independent entries of mean 0 and variance 1 has variance d: its
    standard deviation √d is about 11 at d = 128 and near 23 at d = 512.

    Method: ten times 256 normal queries and keys for each d; the standard deviation of their causal scores by
    `model.backends.naive`, not scaled; its exponent in d is the slope of logarithms. Our attention, scaled by
    1/√d, is observed at its initialisation with entries of variance 1, eight models for each d_head.

    Expected: √128 = 11.3, √512 = 22.6 and the exponent 1/2 (Vaswani et al. 2017, 1706.03762, footnote 4); in
    our attention 1, whatever d_head is.
    """
    raw_RW, ours_RW = _dot_products(given), start(given, WIDTHS).std_RW
    checks = [checked("exponent of std(q·k) in d", exponents(WIDTHS, raw_RW), 0.49, 0.51, "0.50 ± 0.01")]
    for d in (128, 512):
        std_R = raw_RW[:, WIDTHS.index(d)]
        checks.append(checked(f"std(q·k) at d = {d}", std_R, *near(math.sqrt(d), 2)))
    for d, std_R in zip(WIDTHS, ours_RW.T, strict=True):
        what = f"std of our attention's scores at d_head = {d}"
        checks.append(checked(what, std_R, *near(1, 10), premise=True))
    figure, [axes] = panels(subplot_kw={"xlabel": "d", "ylabel": "standard deviation"})
    _against_width(axes, raw_RW, BLUE, "q·k")
    axes.plot(WIDTHS, [d**0.5 for d in WIDTHS], color=GREY, lw=1, label="√d", zorder=0)
    _against_width(axes, ours_RW, GREEN, "our attention's scores, q·k / √d")
    axes.axhline(1, color=GREY, lw=1, zorder=0)
    axes.set_yticks([1, 4, 11.3, 22.6], ["1", "4", "11.3", "22.6"])
    axes.legend(frameon=False)
    return Finding(checks, figures=[figure])


def saturation(given: Given) -> Finding:
    """Softmax of large scores is nearly one-hot, and the nearer it is, the nearer its Jacobian diag(p) - p pᵀ
    comes to zero: softmax([2, 1, 0.5, 0]) = [0.55, 0.20, 0.12, 0.07] is flat, that of eleven times as much
    [1, 0, 0, 0].

    Method: `model.backends.naive.softmax` of these scores times multipliers m up to 20, in double precision;
    its Jacobian by automatic differentiation, in the Frobenius norm; the entropy of the weights.

    Expected: the printed numbers, to two places; the norm tends to 2 exp(-m), as the two largest scores are
    m apart, and its logarithm falls by 1 a step (closed form).
    """
    m_M = torch.arange(0, 20.5, 0.5, dtype=torch.float64)
    scores_MN = torch.outer(m_M, m_M.new_tensor(LOGITS))
    p_MN = torch.stack([_softmax(z_N) for z_N in scores_MN])
    J_MNN = torch.stack([torch.autograd.functional.jacobian(_softmax, z_N) for z_N in scores_MN])
    norm_M, entropy_M = J_MNN.norm(dim=(1, 2)), -torch.xlogy(p_MN, p_MN).sum(-1)
    formula_MNN = p_MN.diag_embed() - p_MN.unsqueeze(2) * p_MN.unsqueeze(1)
    off = (J_MNN - formula_MNN).abs().max().item()
    what = "Jacobian by automatic differentiation less diag(p) - p pᵀ, largest entry"
    checks = [Check(what, off, 0, 1e-12, "0", premise=True)]
    for m, printed in PRINTED.items():
        off = (p_MN[2 * m] - p_MN.new_tensor(printed)).abs().max().item()
        what = f"softmax at m = {m}, largest difference from {printed}"
        checks.append(Check(what, off, 0, 0.005, "below 0.005"))
    ratio = norm_M[22].item() / (2 * math.exp(-11))
    checks.append(Check("norm of the Jacobian at m = 11 over 2 exp(-11)", ratio, *near(1, 1)))
    slope = (norm_M[40] / norm_M[20]).log().item() / 10
    checks.append(Check("slope of ln of the Jacobian's norm, m = 10 to 20", slope, *near(-1, 1)))
    figure, (left, right) = panels(2, subplot_kw={"xlabel": "multiplier m of the scores"})
    left.plot(m_M, entropy_M, color=BLUE)
    left.axhline(math.log(4), color=GREY, lw=1)
    left.text(20, math.log(4), "uniform: ln 4", color=GREY, ha="right", va="bottom")
    left.set(ylabel="entropy of the weights (nats)")
    right.semilogy(m_M, norm_M, color=BLUE, label="measured")
    right.semilogy(11, norm_M[22], "o", color=BLUE)
    right.semilogy(m_M, 2 * torch.exp(-m_M), "--", color=GREY, label="2 exp(-m)")
    right.set(ylabel="norm of the Jacobian")
    right.legend(frameon=False)
    says = [
        f"softmax([2, 1, 0.5, 0]) is [{', '.join(f'{p:.2f}' for p in p_MN[2].tolist())}]; the text's numbers "
        f"sum to {sum(PRINTED[1]):.2f}.",
        f"The norm of the Jacobian is {norm_M[0]:.2f} for uniform weights, {norm_M[2]:.2f} at m = 1 and "
        f"{norm_M[22]:.1e} at m = 11.",
        f"A gradient that goes on to the scores before the multiplier carries m as a factor too: m times the "
        f"norm is largest at m = {m_M[(m_M * norm_M).argmax()]:.1f}.",
    ]
    return Finding(checks, says, [figure])


def early_gradients(given: Given) -> Finding:
    """Without the scale softmax is saturated from the start: early in training the gradients of attention
    vanish and its weights hardly change.

    Method: the gradient of the loss on blocks that repeat, in a layer of our attention at its initialisation
    with entries of variance 1 in queries and keys, eight models for each d_head. Scores are multiplied by
    c = 1/√d_head or by 1, with and without QK-norm, the weights being the same. The norm of the Jacobian is
    the mean over queries that see more than eight tokens. The gradient of W_q itself carries a factor c; over
    c it is what comes through the softmax.

    Expected: with the scale the Jacobian does not depend on d_head. Without it the text has Jacobian and
    gradient vanish. But the Jacobian is large wherever the two largest scores happen to be close, the chance
    of which falls as 1/√d only: the exponent of its mean tends to -1/2 (closed form), while the factor c that
    is missing would have been 1/√d.
    """
    checks, rows = [], []
    figure, (left, right) = panels(2, subplot_kw={"xlabel": "d_head"})
    for qk_norm, style in ((False, "-"), (True, "--")):
        norm = ", QK-norm" if qk_norm else ""
        scaled, bare = (start(given, WIDTHS, scale=scale, qk_norm=qk_norm) for scale in ("sqrt", "none"))
        for found, colour, divisor in ((scaled, GREEN, "√d_head"), (bare, RED, "1")):
            rows.append([f"variance 1{norm}", divisor, *_cells(found, AT_128)])
            label = None if qk_norm else f"scores over {divisor}"
            _against_width(left, found.jacobian_RW, colour, label, style)
            _against_width(right, found.gradient_RW, colour, label, style)
        checks += _early_checks(scaled, bare, norm)
    scaled_gpt2, gpt2 = (start(given, [128], scale=scale, init="gpt2") for scale in ("sqrt", "none"))
    rows += [["GPT-2's", "√d_head", *_cells(scaled_gpt2, 0)], ["GPT-2's", "1", *_cells(gpt2, 0)]]
    left.plot(WIDTHS[2:], [2 * d**-0.5 for d in WIDTHS[2:]], ":", color=GREY, label="exponent -1/2")
    left.set(ylabel="mean norm of the Jacobian", ylim=(0.03, 0.5))
    left.set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    left.legend(frameon=False, loc="lower left", title="dashed: QK-norm")
    right.set(ylabel="|∂L/∂W_q|")
    right.set_yticks([0.3, 1, 3], ["0.3", "1", "3"])
    columns = ["initialisation", "scores over", "std of scores", "norm of the Jacobian", "share below 0.01"]
    table = Table("At d_head = 128", [*columns, "|∂L/∂W_q|", "the same over c"], rows)
    fall, rise = (
        exponents(WIDTHS[AT_128:], numbers_RW[:, AT_128:]).mean()
        for numbers_RW in (bare.jacobian_RW, bare.gradient_RW)
    )
    dead, dead_scaled, dead_gpt2 = (
        f"{found.dead_RW[:, width].mean():.0%}"
        for found, width in ((bare, AT_128), (scaled, AT_128), (gpt2, 0))
    )
    says = [
        f"Without the scale, from d_head = 128 on and with QK-norm, the norm of the Jacobian goes as d_head "
        f"to the power of {fall:.2f} and the gradient of W_q as d_head to the power of {rise:.2f}.",
        f"What saturates is some of the queries: at d_head = 128, with QK-norm, {dead} of them have a "
        f"Jacobian with a norm below 0.01, {dead_scaled} with the scale; the others carry the gradient.",
        f"As GPT-2 is initialised, queries and keys vary less: scores at d_head = 128 have a standard "
        f"deviation of {gpt2.std_RW.mean():.2f} without the scale, and {dead_gpt2} of the queries saturate.",
    ]
    return Finding(checks, says, [figure], [table]) + ablations.learning(given)


def initial_variance(given: Given) -> Finding:
    """With an initial variance of σ² the right factor is σ²√d, not √d.

    Method: ten times 256 queries and keys with normal entries of variance σ² for each d; and the scores of
    our attention, over √d_head, with W_q and W_k times σ, or as GPT-2 is initialised, eight models each.

    Expected: a standard deviation of σ²√d, and of σ² in our attention (closed form). σ² is the variance of
    the entries of queries and keys; weights of variance 0.02², as GPT-2's, make it 256 · 0.02² at width 256.
    """
    checks = []
    figure, [axes] = panels(subplot_kw={"xlabel": "d", "ylabel": "standard deviation of q·k"})
    for sigma, colour in ((0.5, GREEN), (1.0, BLUE), (2.0, RED)):
        raw_RW = _dot_products(given, sigma)
        ratio_R = raw_RW[:, AT_128] / math.sqrt(128)
        checks.append(checked(f"std(q·k) / √d at σ = {sigma:g}, d = 128", ratio_R, *near(sigma**2, 2)))
        std_R = start(given, [128], sigma).std_RW[:, 0]
        what = f"std of our attention's scores, W_q and W_k times {sigma:g}"
        checks.append(checked(what, std_R, *near(sigma**2, 5), premise=True))
        _against_width(axes, raw_RW, colour, f"σ = {sigma:g}")
        axes.plot(WIDTHS, [sigma**2 * d**0.5 for d in WIDTHS], color=GREY, lw=1, zorder=0)
    gpt2_R = start(given, [128], init="gpt2").std_RW[:, 0]
    what = "std of our attention's scores, initialised as GPT-2"
    checks.append(checked(what, gpt2_R, *near(256 * 0.02**2, 5)))
    axes.legend(frameon=False, title="lines: σ²√d")
    normed = start(given, [128], 2.0, qk_norm=True).std_RW.mean()
    says = [f"With QK-norm, W_q and W_k times 2 leave scores over √d a standard deviation of {normed:.2f}."]
    return Finding(checks, says, [figure])


EXPERIMENTS = [
    Experiment(
        3, PART, r"\operatorname{Var}(q \cdot k) = \sum_{t=1}^{d} E[q_t^2]\,E[k_t^2] = d", standard_deviation
    ),
    Experiment(
        4, PART, r"\partial\,\mathrm{softmax}(z) / \partial z = \mathrm{diag}(p) - p p^\top", saturation
    ),
    Experiment(
        5,
        PART,
        r"\partial L / \partial q_i = c \sum_j (\partial L / \partial s_{ij})\, k_j",
        early_gradients,
        [*ablations.NORMED, *ablations.UNNORMED],
    ),
    Experiment(6, PART, r"\mathrm{std}(q \cdot k) = \sigma^2 \sqrt{d}", initial_variance),
]


def _dot_products(given: Given, sigma: float = 1.0) -> Tensor:
    """Their standard deviation in ten repetitions, the heads of one call, by width: R x W."""
    generator, found = given.generator(), []
    for d in WIDTHS:
        q_BHTD, k_BHTD = sigma * torch.randn(2, 1, 10, 256, d, generator=generator)
        found.append(visible(naive.scores(q_BHTD, k_BHTD, 1.0)).std(dim=(0, 2)))
    return torch.stack(found, dim=1)


def _softmax(z_N: Tensor) -> Tensor:
    return naive.softmax(z_N.view(1, 1, 1, -1))[0].flatten()


def _cells(found: Start, width: int) -> list[str]:
    std, jacobian, dead, gradient, over_c = (numbers_RW[:, width].mean() for numbers_RW in found)
    return [f"{std:.2f}", f"{jacobian:.3f}", f"{dead:.0%}", f"{gradient:.2f}", f"{over_c:.2f}"]


def _against_width(axes: Any, y_RW: Tensor, colour: str, label: str | None, style: str = "") -> None:
    """Points at the widths, on logarithmic axes."""
    axes.loglog(WIDTHS, y_RW.mean(0), f"o{style}", color=colour, label=label)
    axes.set_xticks(WIDTHS, WIDTHS)
    axes.minorticks_off()


def _early_checks(scaled: Start, bare: Start, norm: str) -> list[Check]:
    """Of what there is with the scale and without it, by width."""
    flat_R, falling_R = (exponents(WIDTHS, found.jacobian_RW) for found in (scaled, bare))
    over_c_R, itself_R = (
        getattr(bare, name)[:, AT_128] / getattr(scaled, name)[:, AT_128]
        for name in ("over_c_RW", "gradient_RW")
    )
    power = "exponent of the Jacobian norm in d_head,"
    ratio = f"without the scale over with it, d_head = 128{norm}"
    std_R = scaled.std_RW[:, AT_128]
    return [
        checked(f"std of scaled scores at d_head = 128{norm}", std_R, *near(1, 10), premise=True),
        checked(f"{power} scaled{norm}", flat_R, -0.05, 0.05, "0 ± 0.05"),
        checked(f"{power} not scaled{norm}", falling_R, -math.inf, 0, "below 0"),
        checked(f"|∂L/∂W_q| / c {ratio}", over_c_R, 0, 1, "below 1"),
        checked(f"|∂L/∂W_q| {ratio}", itself_R, 0, 1, "below 1"),
    ]
