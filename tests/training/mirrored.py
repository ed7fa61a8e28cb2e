"""Records as a loop writes them, and a log that mirrors them."""

from pathlib import Path

from configs.cli import validate
from training import mirror
from training.loggers import read_records
from training.mirror import MirroredLog

KEY = "a" * 40
LIMITS = dict(mirror.SETTINGS)
ROOT = Path(mirror.__file__).parents[1]


def attention(step: int) -> dict:
    """The fields of a record of two layers with two heads, one score of which is not finite."""
    return {
        "scores": {"sink": [[0.125, 0.375], [None, step / 8]], "mine": [[None, None], [-2.0, -1.0]]},
        "model": {"repeat_loss_1": 3.5, "repeat_loss_2": 2.5, "icl_score": None},
        "probe": {"bos": True, "block_lengths": [4, 8], "skipped_rows": 5, "nonfinite": 4},
        "seconds": 0.25,
    }


def log_of(folder: Path, resume_from: int = -1, steps: int = 12, **log: object) -> MirroredLog:
    folder.mkdir(exist_ok=True)
    config = validate({"train": {"steps": steps}, "log": {"wandb": "offline", **log}})
    return MirroredLog(folder, resume_from, config, "0123abcd")


def write(log: MirroredLog, first: int, last: int) -> None:
    """What a loop writes: a train record a step, a probe every fourth, and its end."""
    for step in range(first, last + 1):
        if step:
            log.write("train", step, loss=1 / (step + 3), tokens_per_s=1000 + step)
        if step % 4 == 0:
            log.write("attention", step, **attention(step))
        log.flush()
    log.write("end", last, seconds=float(last))


def steps_in_records(folder: Path) -> list[int]:
    return sorted({record["step"] for record in read_records(folder / "metrics.jsonl")})
