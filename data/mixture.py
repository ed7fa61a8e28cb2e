"""Which source gives how many sequences of a step's batch: a pure function of the step, by counting alone."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from configs import UserError
from configs.schema import Stage
from data.sources import Batch, Text
from data.synthetic import Synthetic
from data.tokenizers import Tokenizer

Source = Text | Synthetic


class Phase(NamedTuple):
    """A stage in numbers: steps before it, sequences of each source a step, windows each has given before."""

    begin: int
    counts: dict[str, int]
    given: dict[str, int]


class Mixture:
    """Batches from sources in stages; the first source is the one that is validated and probed on."""

    def __init__(
        self, tokenizer: Tokenizer, sources: dict[str, Source], stages: Sequence[Stage], global_batch: int
    ):
        self.tokenizer, self.sources = tokenizer, sources
        first = next(iter(sources))
        main = sources[first]
        self.symbols, self.bytes_per_token = main.symbols, main.bytes_per_token
        self.validation, self.probe_text = main.validation, main.probe_text
        self.fingerprint = "+".join(source.fingerprint for source in sources.values())
        self.phases: list[Phase] = []
        begin, given = 0, dict.fromkeys(sources, 0)
        for stage in stages or [Stage(weights={first: 1.0})]:
            counts = sequences_of(stage.weights, global_batch)
            self.phases.append(Phase(begin, counts, given))
            until = stage.until or begin  # only the last has none
            given = {name: n + (until - begin) * counts.get(name, 0) for name, n in given.items()}
            begin = until

    def batch(self, step: int) -> Batch:
        """The global batch of a step, counted from 1: the next windows of each source of its stage."""
        phase = next(phase for phase in reversed(self.phases) if phase.begin < step)
        parts = [
            self.sources[name].windows(phase.given[name] + (step - 1 - phase.begin) * count, count)
            for name, count in phase.counts.items()
        ]
        inputs, targets = (torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:2])
        return Batch(inputs, targets)

    def describe(self, steps: int) -> list[str]:
        """A line for each source and, where they are mixed, for each stage of a run of so many steps."""
        lines = [f"{name}: {source.description}" for name, source in self.sources.items()]
        for phase in self.phases if len(self.sources) > 1 else []:
            mix = " + ".join(f"{count} {name}" for name, count in phase.counts.items())
            never = f" (never in {steps:,} steps)" if phase.begin >= steps else ""
            lines.append(f"from step {phase.begin + 1:,} on, each step: {mix}{never}")
        return lines


def sequences_of(weights: dict, global_batch: int) -> dict[str, int]:
    """Whole sequences a step in proportion to the weights, by largest remainder; each source gets some."""
    total = sum(map(Fraction, weights.values()))  # floats overflow, and round shares across a whole number
    exact = {name: global_batch * Fraction(weight) / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: global_batch - sum(counts.values())]:
        counts[name] += 1
    if empty := [name for name, count in counts.items() if not count]:
        share = f"{weights[empty[0]]:g} of {sum(weights.values()):g}"
        raise UserError(
            f"data.stages: weight {share} gives {empty[0]} no sequence in a batch of {global_batch}: "
            "raise its weight or train.batch_size"
        )
    return counts
