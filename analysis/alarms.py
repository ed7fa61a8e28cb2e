"""Layers whose attention is beyond what training is known to survive, by the scores of a probe."""

import math
from collections.abc import Sequence
from typing import Any

from configs.schema import Config

Alarm = dict[str, Any]  # `score`, `layer`, `value` (None: not finite), `since`, `text`


def alarms(record: dict[str, Any], config: Config, step: int = 0, last: Sequence[Alarm] = ()) -> list[Alarm]:
    """What the `attention` record of `step` has beyond the limits of `config.alarm`, by layer.

    Entropy collapse (Zhai et al. 2023, 2303.06296): the mean of `entropy_normalized` over the heads is low.
    Logit explosion (Dehghani et al. 2023, 2302.05442; Wortsman et al. 2023, 2309.14322): a head's `max_logit`
    is high.
    `since` is the step of the first probe in a row that found it, by `last`, what the one before gave.
    """
    limits, beyond = config.alarm, []
    for layer, row in enumerate(record["scores"]["entropy_normalized"]):
        finite = [score for score in row if score is not None]
        mean = sum(finite) / len(finite) if finite else math.inf  # numbers that are not: see `max_logit`
        if mean < limits.entropy:
            what = f"attention entropy is {mean:.2g} of the largest possible, below {limits.entropy:g}"
            beyond.append(("entropy_normalized", layer, mean, f"layer {layer}: the mean {what}"))
    for layer, row in enumerate(record["scores"]["max_logit"]):
        largest, head = max((math.inf if score is None else score, head) for head, score in enumerate(row))
        if 0 < limits.max_logit < largest:
            what = f"the largest attention logit is {largest:,.5g}, above {limits.max_logit:,g}"
            beyond.append(("max_logit", layer, row[head], f"layer {layer}, head {head}: {what}"))
    since = {(alarm["score"], alarm["layer"]): alarm["since"] for alarm in last}
    ways = "lower optimizer.lr, raise optimizer.warmup_steps"
    ways += "" if config.model.qk_norm else ", or start anew with model.qk_norm true"
    return [
        {"score": score, "layer": layer, "value": value}
        | {"since": since.get((score, layer), step), "text": f"{text}; {ways}"}
        for score, layer, value, text in beyond
    ]
