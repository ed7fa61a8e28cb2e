"""Twenty thousand steps leave a run as they found it."""

import os
import re
import subprocess
import sys
from statistics import median

import pytest

from tests.runs.soak import Look
from tests.runs.tiny import ROOT


def quarters(values: tuple[float, ...]) -> tuple[float, float]:
    n = len(values) // 4
    return median(values[:n]), median(values[-n:])


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_memory_files_threads_and_the_time_of_a_step_stay_what_they_were(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.runs.soak"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.replace(",", "") for line in done.stdout.splitlines() if re.match(r"\| \d", line)]
    looks = [Look(*map(float, re.findall(r"[\d.]+", row))) for row in rows]
    assert looks[0].step == 1000
    assert looks[-1].step == 20_000
    seen = Look(*zip(*looks, strict=True))
    assert max(seen.memory) <= 1.05 * seen.memory[0]
    assert len({*seen.files}) == len({*seen.threads}) == len({*seen.service_files}) == 1
    # The service of wandb is a Go program whose heap settles at some 5 MiB more than it begins with.
    assert max(seen.service) <= seen.service[0] + 12
    assert max(seen.service_threads) <= seen.service_threads[0] + 4
    first, last = quarters(seen.cpu)  # of the processor: a wall clock would measure what else runs
    assert last <= 2 * first
