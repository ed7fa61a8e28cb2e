"""`torchrun -m tests.runs.ranked JOBS`: one run after the other by the same ranks, for a start takes seconds.

JOBS is a JSON file with a list of requests. A request may come with what one rank does ahead of a step.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

import train
from configs.cli import parse
from tests.runs.tiny import ROOT
from training import checkpoints
from training.distributed import leave


def break_weights(run: train.Run) -> None:
    weight = run.trained.blocks[1].attention.W_q.weight.detach()
    part = weight.to_local() if hasattr(weight, "to_local") else weight
    part[0] = float("nan")


def fill_disk(run: train.Run) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints.save_file = full


ACTS = {
    "end": lambda run: os.kill(os.getpid(), signal.SIGTERM),
    "die": lambda run: os.kill(os.getpid(), signal.SIGKILL),
    "fail": lambda run: int("boom"),
    "break": break_weights,
    "fill": fill_disk,
}


def torchrun(
    ranks: int, folder: Path, *jobs: list[str] | dict, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Run the jobs, each a command line of train.py or `{"argv", "rank", "step", "act"}`."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, "-m", "tests.runs.ranked", str(folder / "jobs.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def main(jobs: list[list[str] | dict]) -> int:
    """The exit code of the first run that is neither done nor interrupted."""
    update = train.update
    join = dist.init_process_group
    dist.init_process_group = lambda *given, **also: dist.is_initialized() or join(*given, **also)
    dist.destroy_process_group = lambda: None  # they meet once
    for job in jobs:
        job = job if isinstance(job, dict) else {"argv": job}

        def acting(run, step, *rest, job=job):
            if (job.get("rank"), job.get("step")) == (run.ranks.rank, step):
                ACTS[job["act"]](run)
            return update(run, step, *rest)

        train.update = acting
        code = train.main(parse(job["argv"]))
        if code not in (0, 130):
            return code
    return 0


if __name__ == "__main__":
    leave(main(json.loads(Path(sys.argv[1]).read_text())))
