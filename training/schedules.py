"""What a step asks for: pure functions of its number, so resuming needs no state."""

import math

from configs.schema import Optimizer as OptimizerConfig


def rate_share(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate as a share of its peak, in (0, 1] for `1 <= step <= steps`.

    Linear warm-up, then constant; or cosine to `final_lr`; or constant and, over the last `decay_share` of
    the steps, down: linear, or as wsd by 1 - sqrt (warm-up, stable, decay: Hu et al. 2024, 2404.06395; the
    root: Hägele et al. 2024, 2405.18392). Both would reach 0 one step after the last.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.final_lr is not None:
        wave = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        return max(config.final_lr + (1 - config.final_lr) * wave, 1e-6)  # with final_lr 0, still a step
    left = min(1.0, (steps - step + 1) / (round((config.decay_share or 0) * steps) + 1))
    return 1 - math.sqrt(1 - left) if config.schedule == "wsd" else left


def due(every: int, step: int, last: int) -> bool:
    """Every `every` steps, the first and the last included; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == last)
