"""Checkpoints: complete or invisible, checked before use, never unpickled.

`checkpoints/step-00000500/` holds `model.safetensors` (parameters by name), `optimizer.safetensors` (moments
as `<parameter>/<key>`), `state.json`, and `checksums.json` with the SHA-256 of these three. It is written
under a temporary name, flushed to the disk and renamed. Random state is not stored: every random stream is a
function of the seed and the step.
"""

import json
import platform
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configs import UserError
from configs.files import sha256_of, to_disk
from configs.ranks import is_first, processes
from configs.schema import Checkpoint as CheckpointConfig
from model.transformer import GPT
from training import Stopped
from training.devices import name_of
from training.distributed import collected, part_of

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
Optimizers = list[torch.optim.Optimizer]


def environment(device: torch.device) -> dict[str, Any]:
    """What two runs must share to agree bit for bit."""
    return {
        "device": name_of(device),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "ranks": processes(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@dataclass
class State:
    """Where a run stands; `best` is the lowest validation loss so far and its step."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0  # steps without an update, because a gradient overflowed in fp16
    scaler: dict[str, float] = field(default_factory=dict)  # what scales the loss in fp16
    seconds: float = 0.0
    telemetry_seconds: float = 0.0
    best: tuple[float, int] | None = None
    fingerprint: str = ""  # of the data
    wandb_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])  # under which the run is mirrored


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    return sorted(int(path.name[5:]) for path in folder.glob("step-" + "[0-9]" * 8))


def is_log_spaced(step: int) -> bool:
    """0, 1, 2, 4 ... 512, 1024, 1536 ..."""
    return step % 512 == 0 or (step < 512 and step & (step - 1) == 0)


def save(folder: Path, model: GPT, optimizers: Optimizers, state: State) -> None:
    """Write the checkpoint of `state.step`. Raises `Stopped` where the disk does not take it.

    Where ranks share the model all call it together, and the first writes.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    weights = {name: collected(p.detach()) for p, name in names.items()}
    moments = {
        f"{names[parameter]}/{key}": collected(value)
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    if not is_first():
        return
    for stale in folder.glob("tmp-*"):  # a kill in the middle of a save or a removal leaves these
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder / f"tmp-{state.step}"
    saved = asdict(state) | {"environment": environment(model.device)}
    try:
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps(saved, indent=1))
        sums = {name: sha256_of(temporary / name) for name in FILES}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
        for path in (*temporary.iterdir(), temporary):
            to_disk(path)
        for step in steps_in(folder):
            if step >= state.step:  # found damaged, or the run would have gone on from there
                _remove(path_of(folder, step))
        temporary.rename(path_of(folder, state.step))
        to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise Stopped(f"cannot save the checkpoint of step {state.step} in {folder}: {error}") from error


def prune(folder: Path, config: CheckpointConfig, best_step: int | None) -> None:
    """Remove checkpoints that no rule keeps: the newest, the best, the log-spaced. The first rank does."""
    steps = steps_in(folder) if is_first() else []
    kept = {best_step if config.keep_best else None, *steps[-config.keep_last :]}
    for step in steps:
        if step not in kept and not (config.log_spaced and is_log_spaced(step)):
            _remove(path_of(folder, step))


def find_intact(folder: Path, step: int | None = None) -> tuple[Path, list[str]]:
    """The checkpoint of `step`, or the newest that is whole; also says what is wrong with newer ones.

    Raises `UserError` where there is none.
    """
    faults, steps = list[str](), steps_in(folder)
    there = ", ".join(map(str, steps)) or "none"
    if step is not None and step not in steps:
        raise UserError(f"no checkpoint of step {step} in {folder}; it has {there}")
    for candidate in reversed(steps if step is None else [step]):
        path = path_of(folder, candidate)
        fault = _fault(path)
        if fault is None:
            return path, faults
        faults.append(f"{path} is damaged ({fault})")
    wanted = "" if step is None else f" of step {step}"
    raise UserError("; ".join([f"no intact checkpoint{wanted} in {folder}, which has {there}", *faults]))


def load_newest(folder: Path, model: GPT, optimizers: Optimizers) -> tuple[State, list[str]]:
    """Fill model and optimizers from the newest intact checkpoint.

    Also returns what is wrong with newer ones, and what has changed since that would change the numbers.
    Raises `UserError` where none is intact, or it holds another model.
    """
    try:
        path, faults = find_intact(folder)
    except UserError as error:
        ways = "start afresh with --config and --run.overwrite true, or in another --run.dir"
        raise UserError(f"{error}; {ways}") from None
    load_weights(path, model)
    parameters = dict(model.named_parameters())
    state_of = {p: o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]}
    for moment, value in load_file(path / "optimizer.safetensors").items():
        name, key = moment.rsplit("/", 1)
        parameter, value = parameters[name], value.to(model.device)
        state_of[parameter][key] = part_of(value, parameter) if value.dim() else value
    saved = json.loads((path / "state.json").read_text())
    then, now = saved.pop("environment"), environment(model.device)
    then.setdefault("ranks", 1)  # what was saved before runs could have several
    changed = [f"{key} was {then[key]}, is {now[key]}" for key in now if then[key] != now[key]]
    faults += [f"the run will not continue bit for bit: {', '.join(changed)}"] if changed else []
    return State(**saved), faults


def load_weights(path: Path, model: GPT, may_lack: tuple[str, ...] = ()) -> None:
    """Fill the model from an intact checkpoint; `UserError` if it holds another model.

    Parameters whose names end as one of `may_lack` does may be missing, there or here: they stay as they are.
    """
    parameters, saved = dict(model.named_parameters()), load_file(path / "model.safetensors")
    want, have = ({name: t.shape for name, t in tensors.items()} for tensors in (parameters, saved))
    differ = [name for name in {**want, **have} if want.get(name) != have.get(name)]
    if wrong := [name for name in differ if not name.endswith(may_lack)]:
        raise UserError(
            f"{path} holds another model or vocabulary than config and data give: see {min(wrong)}"
        )
    with torch.no_grad():
        for name in parameters.keys() & saved.keys():
            parameters[name].copy_(part_of(saved[name].to(model.device), parameters[name]))


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is intact."""
    try:
        sums = json.loads((path / "checksums.json").read_text())
        wrong = [name for name in FILES if sha256_of(path / name) != sums[name]]
        return f"{wrong[0]} does not match its checksum" if wrong else None
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"checksums.json is unreadable: {error}"


def _remove(path: Path) -> None:
    """Make a checkpoint invisible in one move, then delete it."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f"tmp-{path.name}")), ignore_errors=True)
