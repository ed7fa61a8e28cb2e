"""What an experiment finds: numbers against what they should be, the verdict that follows, pictures."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.probes import Probes
    from data.treebank import Sentence
    from model.transformer import GPT

Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]


@dataclass(frozen=True)
class Check:
    """A number against what it would be if the statement were true: within `low` and `high`.

    `error` is half of its 95 % interval, 0 for what is exact. A `premise` is not part of the statement but
    what the experiment stands on, such as that our mask lets nothing through.
    """

    what: str
    measured: float
    low: float
    high: float
    expected: str  # in words: "11.3 within 2 %"
    error: float = 0.0
    premise: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether all of the interval is within, or none of it; None for some of it. NaN never is."""
        lowest, highest = self.measured - self.error, self.measured + self.error
        if math.isnan(lowest) or math.isnan(highest):
            return False
        if self.low <= lowest and highest <= self.high:
            return True
        return None if lowest <= self.high and self.low <= highest else False


def near(number: float, percent: float) -> tuple[float, float, str]:
    """The bounds of a check around a number, and how they are said."""
    apart = abs(number) * percent / 100
    return number - apart, number + apart, f"{number:.3g} within {percent:g} %"


@dataclass(frozen=True)
class Table:
    """Rows of cells below a heading; numbers are formatted already."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """What one experiment, or several parts of it together, came to.

    `says`: sentences that carry numbers. `missing`: what was not measured and the command that would.
    """

    checks: Sequence[Check] = ()
    says: Sequence[str] = ()
    figures: "Sequence[Figure]" = ()
    tables: Sequence[Table] = ()
    missing: Sequence[str] = ()

    def __add__(self, other: "Finding") -> "Finding":
        return Finding(*([*getattr(self, name), *getattr(other, name)] for name in self.__dataclass_fields__))

    @property
    def verdict(self) -> Verdict:
        """Whether all checks hold, none or some; where a premise does not, the statement does not either."""
        if any(check.premise and check.holds is not True for check in self.checks):
            return "does not hold"
        found = [check.holds for check in self.checks if not check.premise]
        if not any(holds is not None for holds in found):
            return "not measured"
        if all(found):
            return "holds"
        return "holds in part" if any(found) else "does not hold"

    @property
    def tally(self) -> str:
        """What the verdict rests on: "Checks: 2 hold, 1 undecided."; nothing without checks."""
        found = [check.holds for check in self.checks if not check.premise]
        if not found:
            return ""
        counts = {"hold": found.count(True), "fail": found.count(False), "undecided": found.count(None)}
        words = f"Checks: {', '.join(f'{n} {what}' for what, n in counts.items() if n)}."
        if broken := sum(check.premise and check.holds is not True for check in self.checks):
            words += f" Premises that do not hold: {broken}."
        return words + (" A part is not measured: see below." if self.missing else "")


@dataclass(frozen=True)
class Subject:
    """A trained model to look at, of --run or of --model; it is in evaluation mode.

    `probes` fit its context. `text_N` is text that it was not trained on, or the corpus of a published model,
    as one row of tokens without BOS. `sentences`: of the file `treebank`, if one was given.
    """

    name: str
    command: str  # that names it: "--run runs/quickstart"
    model: "GPT"
    probes: "Probes"
    text_N: torch.Tensor
    bos: int | None
    bos_trained: bool
    seed: int
    tokenizer: Any = None
    sentences: "Sequence[Sentence] | None" = None
    treebank: str = ""


Seeds = Sequence[Mapping[str, float]]  # of one setting: the numbers of each finished run, by seed


@dataclass(frozen=True)
class Given:
    """All that an experiment may use.

    `trained`: by the name of its config in `configs/ablations/`, the finished runs of a setting, in the order
    of their seeds. `find_nonfinite(model, losses, loss)`: the guard of the training loop.
    """

    find_nonfinite: Callable[..., str]
    seed: int = 1
    subjects: Sequence[Subject] = ()
    trained: Mapping[str, Seeds] = field(default_factory=dict)

    def generator(self) -> torch.Generator:
        """A new one, on the CPU: experiments cannot shift each other."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Experiment:
    """A statement of the text and the function that measures it; its docstring stands beside the numbers."""

    number: int
    part: str  # of the text
    formula: str  # LaTeX
    function: Callable[[Given], Finding]
    trainings: Sequence[str] = ()  # that it needs: names of configs in configs/ablations/

    @property
    def claim(self) -> str:
        """The first sentences of the docstring."""
        return " ".join(self._paragraphs()[0].split())

    @property
    def about(self) -> list[str]:
        """The rest of the docstring: method, expected value, source; a paragraph each."""
        return [" ".join(paragraph.split()) for paragraph in self._paragraphs()[1:]]

    def _paragraphs(self) -> list[str]:
        return (inspect.getdoc(self.function) or "").split("\n\n")
