"""The meter against sums by hand, and its bytes against the system's."""

import json
import subprocess
import sys

import pytest
import torch

from analysis.derivation.meter import Meter, seconds

CHILD = """
import json, re, torch
from pathlib import Path
from analysis.derivation.meter import Meter
from model.backends import BACKENDS

def resident():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

found = {}
for backend, n in (("sdpa", 8192), ("naive", 4096)):
    x = torch.ones(1, 1, n, 64)
    with Meter():  # and the modules that come with it
        BACKENDS[backend](x[:, :, :64], x[:, :, :64], x[:, :, :64], scale=0.1)
    before = resident()
    with Meter() as meter:
        BACKENDS[backend](x, x, x, scale=0.1)
    found[backend] = [resident() - before, meter.peak]
print(json.dumps(found))
"""


def test_the_peak_is_of_tensors_that_live_together() -> None:
    with Meter() as meter:
        a = torch.ones(1000)
        b = a * 2
        del a
        c = b + 1
    assert meter.peak == b.nbytes + c.nbytes == 8000


def test_views_and_changes_in_place_take_and_move_nothing() -> None:
    x = torch.ones(10, 10)
    with Meter(watched=[x]) as meter:
        x.T[2:].unsqueeze(0).expand(5, 8, 10)
        x.add_(1)
    assert (meter.peak, meter.moved, meter.read) == (0, 0, 0)


def test_what_is_read_counts_as_often_as_it_is_and_for_the_part_that_is() -> None:
    x, other = torch.ones(10, 8), torch.ones(8, 3)
    with Meter(watched=[x]) as meter:
        for rows in (slice(0, 4), slice(2, 10)):
            x[rows] @ other
    assert meter.read == 4 * 8 * (4 + 8)
    assert meter.moved == meter.read + 4 * (2 * 8 * 3 + (4 + 8) * 3)


def test_the_bytes_are_those_that_the_process_takes() -> None:
    """In a process of its own. Fused: whatever the kernel keeps inside, it is far from n^2 numbers."""
    arguments = [sys.executable, "-c", CHILD]
    found = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    resident, metered = found["naive"]
    assert resident == pytest.approx(metered, rel=0.1)
    resident, metered = found["sdpa"]
    assert metered < 1.1 * resident
    assert resident < 4 * 8192**2 / 10


def test_runs_take_turns_and_the_first_round_is_left_out() -> None:
    calls: list[str] = []
    taken = seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert {name: times.shape for name, times in taken.items()} == {"a": (3,), "b": (3,)}
