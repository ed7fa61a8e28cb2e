"""IV, continued: why a head puts its weight on the first token, and what happens where it need not."""

from dataclasses import replace

from analysis.derivation.ablations import compare, found, line
from analysis.derivation.finding import Experiment, Finding, Given
from analysis.derivation.multihead import PART
from analysis.derivation.streaming import streaming

LABEL = 0.3  # weight on BOS from which on analysis/heads.py calls a head a sink
NONE = "sink_none"
VARIED = ["sink_zero_fast", "sink_zero_rotary", "sink_zero_no_bias"]
ELSEWHERE = ["sink_zero", "sink_learned", "sink_gate", *VARIED]


def sinks(given: Given) -> Finding:
    """Attention sinks exist because softmax must sum to 1: weight that a head has no use for needs a place.
    This is why streaming inference must not drop the first keys and values.

    Method: one layer of one head on Bigram-Backcopy, where it has work to do after three trigger tokens only:
    as it is; with one more outcome of the softmax that has no value, of score 0 or learned; with a gate that
    turns the head's output off. The first of these also at four times the rate, with rotary positions, and
    without biases. A trained model reads far past its window, the first entries of its cache kept or dropped.

    Expected: a weight on BOS of at least 0.3 as it is, the premise, and of less in each other case
    (Miller 2023; Guo et al. 2024, 2410.13835; Gu et al. 2024, 2410.10781; Qiu et al. 2025, 2505.06708).
    """
    return interventions(given) + streaming(given)


def interventions(given: Given) -> Finding:
    """The trainings: is the sink gone where weight may go elsewhere?"""
    as_it_is = compare(given, f"{NONE}: weight on BOS", float, "sink", NONE, low=LABEL)
    checks = [replace(check, premise=True) for check in as_it_is]
    for name in ELSEWHERE:
        checks += compare(given, f"{name}: weight on BOS", float, "sink", name, high=LABEL)
    gate = "A gate that is closed makes weights irrelevant: weight that stays on BOS there refutes nothing."
    says = [gate] if given.trained.get("sink_gate") else []
    finding = found(given, [NONE, *ELSEWHERE], checks, says, ["sink", "loss", "entropy"])
    for figure in finding.figures:
        line(figure.axes[0], LABEL, "a sink from here on")
    return finding


EXPERIMENTS = [Experiment(11, PART, r"\sum_j A_{ij} = 1", sinks, [NONE, *ELSEWHERE])]
