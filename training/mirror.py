"""Weights & Biases as a mirror of metrics.jsonl: the same numbers, and heat maps of the heads.

What goes wrong there never ends a run: one warning, and metrics.jsonl goes on. Every wait has a bound.
"""

import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

from configs.schema import Config
from training.heatmap import draw
from training.loggers import JsonLines, read_records

SETTINGS: dict[str, Any] = {
    **{"silent": True, "console": "off", "disable_git": True, "save_code": False, "x_disable_stats": True},
    "symlink": False,  # absolute links would break where the run folder is moved
    "x_transaction_log_flush_interval": 0.05,  # seconds that a kill may cost until the run is resumed
    "init_timeout": 6,  # seconds; a run never waits more than 20 in all
    "finish_timeout": 8,
    "finish_timeout_raises": True,
}


class Watch(Thread):
    """Kills wandb's service where a call to it (`with watch:`) does not come back: then it raises.

    A service that stands still, stopped or starved, is waited for without end by wandb itself.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.left = math.inf  # seconds, but for those in which this process stood still as well
        self.over = Event()

    def run(self) -> None:
        """Look once a second until it is over."""
        service = None
        while not self.over.wait(1):
            with suppress(AttributeError, KeyError):  # there is none yet, or not any more
                service = sys.modules["wandb"].sdk.wandb_setup._singleton._connection._proc._process
            self.left -= 1
            if self.left < 0 and service:
                service.kill()

    def __enter__(self) -> None:
        self.left = SETTINGS["init_timeout"] + SETTINGS["finish_timeout"]

    def __exit__(self, *_: object) -> None:
        self.left = math.inf


class MirroredLog(JsonLines):
    """Writes each record to metrics.jsonl and then to Weights & Biases, as `log.wandb` wants it.

    What a resumed run lacks there is taken from metrics.jsonl. Offline that is everything: Weights & Biases
    cannot go on in the folder of before, so that one is removed once the new one has caught up.
    """

    def __init__(self, folder: Path, resume_from: int, config: Config, run_id: str):
        super().__init__(folder / "metrics.jsonl", resume_from)
        self._config = config
        self._run: Any = None
        self._watch = Watch()
        self._row, self._probed = -1, -1  # steps of the row that is open and of the last probe
        if resume_from < 0:  # a start that was killed before its first checkpoint may have left one
            shutil.rmtree(folder / "wandb", ignore_errors=True)
        if config.log.wandb == "disabled":
            return
        self._watch.start()
        with self._forgiving(), _overruling(config):
            self._run = _open(folder, config, run_id)
            for record in read_records(folder / "metrics.jsonl") if self._run else ():
                with self._watch:  # each has its time
                    self._mirror(record)
            self.flush()
            for old in (folder / "wandb").glob(f"*run-*-{run_id}*") if self._run else ():
                if old.name != Path(self._run.sync_dir).name:
                    shutil.rmtree(old)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One record, as `JsonLines` has it; all records of a step make one row there."""
        super().write(kind, step, **fields)
        if self._run is not None:
            with self._forgiving():
                self._mirror({"kind": kind, "step": step, **fields})

    def flush(self, durable: bool = False) -> None:
        """As `JsonLines` has it; and end the row of this step there: nothing can be added to it."""
        super().flush(durable)
        if self._run is not None and self._row >= 0:
            with self._forgiving():
                self._run.log({}, step=self._row, commit=True)
        self._row = -1

    def heads(self, rows: list[dict[str, Any]]) -> None:
        """Show what heads.json holds as a table, one head a row."""
        if self._run is not None and rows:
            with self._forgiving():
                _show_heads(self._run, rows)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        finally:
            if self._run is not None:
                with self._forgiving():
                    _end(self._run, exit_code=int(kind is not None))
            self._watch.over.set()

    def _mirror(self, record: dict[str, Any]) -> None:
        run, step = self._run, record["step"]
        values: dict[str, Any] = numbers(record)
        if record["kind"] == "end":  # once a run, and replaced where the run goes on
            run.summary.update(values)
            return
        pictured = record["kind"] == "attention" and self._pictured(step)
        if step < run.starting_step:  # online: the server has it
            return
        for alarm in record.get("alarms", ()):
            if alarm["since"] == step:  # once, until it has recovered
                title = f"{alarm['score']} of layer {alarm['layer']}"
                run.alert(title, f"step {step}: {alarm['text']}", "WARN")
        if pictured:
            from wandb import Image

            for name, rows in record["scores"].items():
                # Of a score at two block lengths the headline, the smaller of both, is enough to look at.
                if not name.endswith(("_short", "_long")):
                    values[f"heads/{name}"] = Image(draw(f"{name}, step {step}", rows))
        run.log(values, step=step)
        self._row = step

    def _pictured(self, step: int) -> bool:
        """Whether this probe is the first, the last, or the next after a multiple of `log.image_every`."""
        before, self._probed = self._probed, step
        every = self._config.log.image_every or 0
        at_ends = before < 0 or step == self._config.train.steps
        return every > 0 and (at_ends or step // every > before // every)

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        with self._watch:
            try:
                yield
            except (Exception, SystemExit) as error:  # wandb may exit where its service has died
                run, self._run = self._run, None
                rest = "" if run is None else f"; for what it got so far: wandb sync {run.sync_dir}"
                _warn(f"{_line(error)}; metrics.jsonl has everything{rest}")
                with suppress(Exception, SystemExit):
                    _end(run, exit_code=1)


def log_evaluation(folder: Path, config: Config, mode: str, rows: list[dict[str, Any]], image: Path) -> None:
    """A run of its own there, below `folder`, with the table of the heads and the picture."""
    config = config.model_copy(update={"log": config.log.model_copy(update={"wandb": mode})})
    run, watch = None, Watch()
    watch.start()
    try:
        with watch, _overruling(config):
            if run := _open(folder, config, uuid.uuid4().hex[:8]):
                from wandb import Image

                _show_heads(run, rows)
                run.log({"heads/picture": Image(str(image))})
                _end(run, exit_code=0)
    except (Exception, SystemExit) as error:
        _warn(f"{_line(error)}; {folder} has everything")
        with suppress(Exception, SystemExit):
            _end(run, exit_code=1)
    finally:
        watch.over.set()


def _show_heads(run: Any, rows: list[dict[str, Any]]) -> None:
    from wandb import Table

    table = Table([*rows[0]], [[*row.values()] for row in rows])
    # Bound beforehand it becomes no artifact, which would lie outside the run folder.
    table.bind_to_run(run, "heads", "summary")
    run.summary["heads"] = table


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """A record as Weights & Biases shows it: of the heads of each layer the mean and the largest score.

    None, a number that is not finite, is left out; `attention/nonfinite` counts these.
    """
    kind, plain = record["kind"], record | record.get("model", {})
    plain |= {name: record["probe"][name] for name in ("nonfinite", "skipped_rows") if "probe" in record}
    found = {f"{kind}/{k}": v for k, v in plain.items() if isinstance(v, int | float) and k != "step"}
    for name, rows in record.get("scores", {}).items():
        for layer, row in enumerate(rows):
            if finite := [score for score in row if score is not None]:
                found[f"{kind}/{name}/layer{layer:02}"] = sum(finite) / len(finite)
                found[f"{kind}/{name}/layer{layer:02}_max"] = max(finite)
    return found


def _open(folder: Path, config: Config, run_id: str) -> Any:
    """The run, opened online or else offline; None where WANDB_MODE says that there is to be none."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without a network it takes 20 s at the end
    import wandb

    own: dict[str, Any] = {} if config.log.wandb == "auto" else {"mode": config.log.wandb}
    mode = wandb.setup(wandb.Settings(silent=True, **own)).settings.mode  # or of WANDB_MODE, or wandb's files
    if mode == "disabled":
        wandb.teardown()  # the next run of this process asks anew
        return None
    keywords: dict[str, Any] = {"project": config.log.project, "group": config.log.group, "resume": "allow"}
    keywords |= {"id": run_id, "name": folder.resolve().name, "dir": str(folder.absolute())}
    keywords |= {"config": config.model_dump(), "settings": wandb.Settings(**SETTINGS)}
    trouble = ""
    if mode not in ("offline", "dryrun"):
        try:
            if wandb.login(prompt=False, verify=False):  # looks whether there is a key; asks nobody
                run = wandb.init(mode="online", **keywords)
                print(f"  wandb  {run.url}", flush=True)
                return run
            trouble = "" if config.log.wandb == "auto" else "no API key: wandb login, or WANDB_API_KEY"
        except Exception as error:
            trouble = _line(error)
            wandb.teardown()  # it would keep the id in use
    run = wandb.init(mode="offline", **keywords)
    if trouble:
        _warn(f"{trouble}; it is kept offline, for later: wandb sync {run.sync_dir}")
    return run


@contextmanager
def _overruling(config: Config) -> Iterator[None]:
    """The environment without what the run or its configuration knows better; it is back afterwards.

    A sweep's id would win over ours, and the others may be nothing that wandb accepts.
    """
    overruled = ["WANDB_RUN_ID", "WANDB_SWEEP_ID", *(["WANDB_MODE"] if config.log.wandb != "auto" else [])]
    before = {name: os.environ.pop(name) for name in overruled if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _end(run: Any, exit_code: int) -> None:
    """Finish the run and wandb's service; nothing of them is left to the next run of this process."""
    import wandb

    try:
        if run is not None:
            run.finish(exit_code)
    finally:
        wandb.teardown()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _warn(message: str) -> None:
    tqdm.write(f"warning: Weights & Biases: {message}", file=sys.stderr)
