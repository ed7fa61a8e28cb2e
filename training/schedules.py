"""The learning rate of a step, as a share of its peak: a pure function, so resuming needs no state."""

import math

from configs.schema import Optimizer as OptimizerConfig


def rate_share(step: int, steps: int, config: OptimizerConfig) -> float:
    """In (0, 1] for `1 <= step <= steps`: linear warm-up, then cosine to `final_lr`, or constant and linear.

    The linear decay would reach 0 one step after the last.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.final_lr is not None:
        wave = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        return max(config.final_lr + (1 - config.final_lr) * wave, 1e-6)  # with final_lr 0, still a step
    return min(1.0, (steps - step + 1) / (round((config.decay_share or 0) * steps) + 1))
