"""How fast the machine could compute: what the utilisation of a run is measured against."""

import functools
import time

import torch
import torch.nn.functional as F

BUDGET = 0.3  # seconds


@functools.cache
def ceiling(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the fastest of several products of square matrices, in growing sizes as time allows.

    Measured on this machine, in the precision of the linear layers and with what else runs now, rather than
    read off a data sheet. None where the device does not multiply in `dtype`.
    """
    best, size, end = 0.0, 256, time.perf_counter() + BUDGET
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(size, size, device=device, generator=generator).to(dtype)
    while (started := time.perf_counter()) < end:
        try:
            F.linear(matrix, matrix)[0, 0].item()  # waits for the device
        except RuntimeError:
            return None
        seconds = time.perf_counter() - started
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds < (end - started) / 4:  # what twice the size takes
            size *= 2
            matrix = torch.randn(size, size, device=device, generator=generator).to(dtype)
    return best


class Meter:
    """Tokens a second of the updates alone, and what share of the `ceiling`, in FLOP/s, they make use of."""

    def __init__(self, flops_per_token: float, ceiling: float | None):
        self.flops_per_token, self.ceiling = flops_per_token, ceiling
        self._tokens, self._seconds = 0, 0.0

    def count(self, tokens: int, seconds: float) -> None:
        """One more update."""
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds

    def read(self) -> dict[str, float | None]:
        """`tokens_per_s` and `mfu` since the last reading, for the record.

        Model FLOPs utilisation (Chowdhery et al. 2022, 2204.02311) is against what this machine was seen to
        do: the measured ceiling, or this very rate if it is higher. So it is never above 1; None without one.
        """
        rate = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        flops = rate * self.flops_per_token
        mfu = None if self.ceiling is None else flops / max(flops, self.ceiling)
        return {"tokens_per_s": round(rate), "mfu": mfu}
