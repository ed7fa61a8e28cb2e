"""What short trainings say of statements 1, 2, 5, 14: one part of attention changed, all else as it was."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from math import inf, log, nan, nextafter, sqrt
from operator import sub, truediv
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.derivation import intervals
from analysis.derivation.drawing import COLOURS, GREY, panels
from analysis.derivation.finding import Check, Finding, Given, Seeds, Table
from data.corpora import shakespeare, split

TRAIN = "`python -m scripts.derive --train`"
VALIDATED, T = 0.05, 64  # share of the plays and the context, as in configs/ablations/
HARDLY = 0.25  # of what is learned with the scale
COLUMNS = {  # of a finished run
    "loss": "validation loss, nats",
    "repeat_loss_2": "loss on a second repeat, nats",
    "learned_early": "training loss fallen half-way, nats",
    "induction": "best induction head",
    "previous": "best previous-token head",
    "current": "weight on the token itself",
    "sink": "best sink",
    "entropy": "entropy, normalized",
}
How = Callable[..., float]

# Names of configs in configs/ablations/.
BASES = {"separate", "learned", "no_norm", "sink_none"}  # that others are compared with
DIRECTIONS = ["separate", "qk_tied", "qk_identity", "learned", "learned_tied"]
VALUES = ["separate", "value_key", "value_identity"]
NORMED = ["separate", "scale_none", "scale_linear"]
UNNORMED = ["no_norm", "no_norm_scale_none", "no_norm_scale_linear"]
GROUPS = ["separate", "kv_1"]


def directions(given: Given) -> Finding:
    """Statement 1: what attention learns without parameters, and what is lost where keys are the queries.

    An attention works if it does more than the current token alone, and so a model without one, can tell.
    """
    without = bigram_loss(*split(shakespeare(), VALIDATED)) if given.trained else nan
    what = "loss on text, identity (bound: without attention, by pairs of characters)"
    checks = compare(given, what, float, "loss", "qk_identity", high=without)
    for name, tied, where in (("separate", "qk_tied", "rotary"), ("learned", "learned_tied", "learned")):
        checks += compare(given, f"{where}: loss on text, tied - separate", sub, "loss", tied, name, low=0)
        checks += compare(given, f"{where}: induction, separate - tied", sub, "induction", name, tied, low=0)
    says = [
        "With tied projections and QK-norm no key scores higher with the query of a token than its own: see "
        "the weight on the token itself. What is lost with them is not direction alone.",
    ]
    return found(given, DIRECTIONS, checks, says, ["loss", "induction", "previous", "current"])


def carried(given: Given) -> Finding:
    """Statement 2: what it costs to carry what is scored, the key, or what the layer reads."""
    checks = []
    for key, where in (("loss", "text"), ("repeat_loss_2", "a second repeat")):
        for name in VALUES[1:]:
            what = f"loss on {where}, {name} - separate"
            checks += compare(given, what, sub, key, name, "separate", low=0)
    return found(given, VALUES, checks, [], ["loss", "repeat_loss_2", "induction"])


def learning(given: Given) -> Finding:
    """Statement 5: what is learned in the first half of a training, and in all of it, without the scale.

    "Hardly learns" is taken as: not a quarter of the loss that is unlearned with the scale by then.
    """
    checks, says = [], []
    for (name, none, linear), where in ((NORMED, "QK-norm"), (UNNORMED, "no norm")):
        early = f"{where}: nats learned half-way, without the scale over with it"
        loss = f"{where}: loss on text, without the scale - with it"
        checks += compare(given, early, truediv, "learned_early", none, name, high=HARDLY)
        checks += compare(given, loss, sub, "loss", none, name, low=0)
        if len(changes := paired(given, sub, "loss", linear, name)) > 1:
            change = "{:+.3f} ± {:.3f} nats".format(*intervals.mean(changes))
            says.append(f"To divide by d rather than √d changes the loss on text by {change} ({where}).")
    return found(given, [*NORMED, *UNNORMED], checks, says, ["learned_early", "loss", "induction", "entropy"])


def grouped(given: Given) -> Finding:
    """Statement 14: what it costs to share keys and values. The text does not call it free: no check."""
    says = []
    for name in GROUPS[1:]:
        if len(lost := paired(given, sub, "loss", name, "separate")) > 1:
            change = "{:+.3f} ± {:.3f} nats".format(*intervals.mean(lost))
            says.append(f"Against separate, {name} changes the loss on text by {change}.")
    return found(given, GROUPS, [], says, ["loss", "repeat_loss_2", "induction"])


def compare(
    given: Given, what: str, how: How, key: str, *cells: str, low: float = -inf, high: float = inf
) -> list[Check]:
    """The check of what is `paired`: mean and t interval. None where fewer than two seeds have all cells."""
    values = paired(given, how, key, *cells)
    expected = f"above {low:g}" if high == inf else f"below {high:.3g}"
    strictly = nextafter(low, inf), nextafter(high, -inf)  # two runs that are the same differ by exactly 0
    return [intervals.checked(what, values, *strictly, expected)] if len(values) > 1 else []


def paired(given: Given, how: How, key: str, *cells: str) -> list[float]:
    """`how` of the values of `key` in `cells`, for each seed that all of them have."""
    by_seed = [{run["seed"]: run[key] for run in given.trained.get(name, ())} for name in cells]
    shared = set.intersection(*map(set, by_seed))
    return [how(*(cell[seed] for cell in by_seed)) for seed in shared]


def found(
    given: Given, cells: Sequence[str], checks: Sequence[Check], says: Sequence[str], keys: Sequence[str]
) -> Finding:
    """With a table of `keys` in all cells, a figure of the first two, and what is not trained."""
    trained = {name: given.trained[name] for name in cells if given.trained.get(name)}
    lacking = [name for name in cells if len(trained.get(name, ())) < 2]
    missing = [f"trainings of {', '.join(lacking)}, two seeds or more: {TRAIN}"] if lacking else []
    if not trained:
        return Finding(missing=missing)
    rows = [[name, *(_mean([run[key] for run in runs]) for key in keys)] for name, runs in trained.items()]
    columns = ["config", *(COLUMNS[key] for key in keys)]
    title = "Trainings of configs/ablations/, mean ± standard error over seeds (above, a point a run)"
    table = Table(title, columns, rows)
    return Finding(checks, says, [draw(trained, keys[:2])], [table], missing)


def draw(trained: Mapping[str, Seeds], keys: Sequence[str]) -> Figure:
    """A point a run; dashed: the mean of a setting, as far as the settings go that are compared with it."""
    figure, axes = panels(len(keys))
    names = [*trained]
    for ax, key in zip(axes, keys, strict=True):
        for x, name in enumerate(names):
            values = [run[key] for run in trained[name]]
            ax.plot([x] * len(values), values, "o", color=COLOURS[name not in BASES], alpha=0.7)
            if name in BASES:
                end = next((i for i in range(x + 1, len(names)) if names[i] in BASES), len(names))
                ax.hlines(mean(values), x - 0.3, end - 0.7, GREY, "--", lw=1, zorder=0)
        ax.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        ax.set_ylabel(COLUMNS[key])
    return figure


def line(ax: Axes, y: float, says: str) -> None:
    """Dashed, with words at its right end."""
    ax.axhline(y, color=GREY, ls="--", lw=1, zorder=0)
    ax.annotate(says, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8)


def bigram_loss(training: str, text: str) -> float:
    """Of guessing by counts of pairs, plus one, in windows of `T` characters behind BOS; nats a character."""
    counts = Counter([*pairwise(training), *(("", character) for character in training)])
    firsts, V = Counter(first for first, _ in counts.elements()), len({*training})
    windows = [[("", text[i]), *pairwise(text[i : i + T])] for i in range(0, len(text), T)]
    losses = [log((firsts[pair[0]] + V) / (counts[pair] + 1)) for pair in chain(*windows)]
    return sum(losses) / len(losses)


def _mean(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{error}"
