"""Scores of a model, and of a single sequence of a probe, each from a forward pass of its own."""

from dataclasses import replace

from analysis.probes import Probe, Probes, Scores, headlines, look
from model.transformer import GPT


def score(model: GPT, probes: Probes) -> Scores:
    return headlines(*(look(model, name, probe, losses=False).scores for name, probe in probes.items()))


def only(probe: Probe, n: int) -> Probe:
    segment_1T = None if probe.segment_BT is None else probe.segment_BT[n : n + 1]
    return replace(probe, tokens_BT=probe.tokens_BT[n : n + 1], segment_BT=segment_1T)
