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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from configs import UserError
from configs.files import read_json, sha256_of, to_disk
from configs.ranks import is_first, processes
from configs.schema import Checkpoint as CheckpointConfig
from configs.schema import Model as ModelConfig
from configs.screen import foreign
from model.interop import imagined, refuse_long
from model.tensors import Stored, open_tensors
from model.transformer import GPT
from training import Stopped
from training.devices import name_of
from training.distributed import collected, part_of

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
Optimizers = list[torch.optim.Optimizer]
HexId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{8}$")]  # it becomes a part of names of files
Seconds = Annotated[float, Field(ge=0, le=1e12)]  # one is divided by the other
MOMENTS = {"AdamW": ["step", "exp_avg", "exp_avg_sq"], "Muon": ["momentum"]}
SCALERS = [{*()}, {*torch.amp.GradScaler("cpu").state_dict()}]


def _whole_alarm(alarm: dict[str, Any]) -> dict[str, Any]:
    if [type(alarm.get(key)) for key in ("score", "layer", "since")] != [str, int, int]:
        raise ValueError("an alarm says of no score and layer since when")
    return alarm


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

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    step: int = 0
    tokens: int = 0
    skipped: int = 0  # steps without an update, because a gradient overflowed in fp16
    scaler: dict[str, int | float] = field(default_factory=dict)  # what scales the loss in fp16
    seconds: Seconds = 0.0
    telemetry_seconds: Seconds = 0.0
    best: tuple[float, int] | None = None
    # what the last probe found beyond limits
    alarms: list[Annotated[dict[str, Any], AfterValidator(_whole_alarm)]] = field(default_factory=list)
    fingerprint: str = ""  # of the data
    wandb_id: HexId = field(default_factory=lambda: uuid.uuid4().hex[:8])  # under which the run is mirrored


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
    _sweep(folder)
    temporary = folder / f"tmp-{state.step}"
    saved = asdict(state) | {"environment": environment(model.device)}
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone is not made anew
        temporary.mkdir()
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

    The last of these words says which is used in their place. Raises `UserError` where there is none.
    """
    faults, steps = list[str](), steps_in(folder)
    there = ", ".join(map(str, steps)) or "none"
    if step is not None and step not in steps:
        raise UserError(f"no checkpoint of step {step} in {folder}; it has {there}")
    for candidate in reversed(steps if step is None else [step]):
        path = path_of(folder, candidate)
        fault = _fault(path)
        if fault is None:
            return path, [*faults[:-1], *(f"{last}; going back to {path.name}" for last in faults[-1:])]
        if path.exists():  # else a training that goes on has rotated it away
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
    _sweep(folder)
    load_weights(path, model)
    moments = open_tensors(path / "optimizer.safetensors")
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            keys = {f"{names[parameter]}/{key}": key for key in MOMENTS[type(optimizer).__name__]}
            found = {key: moments.pop(name) for name, key in keys.items() if name in moments}
            shapes = {key: [] if key == "step" else [*parameter.shape] for key in keys.values()}
            if found and {key: stored.shape for key, stored in found.items()} != shapes:
                raise UserError(f"{path}/optimizer.safetensors does not fit {names[parameter]}")
            for key, one in found.items():
                value = one.read().to(model.device)
                optimizer.state[parameter][key] = part_of(value, parameter) if value.dim() else value
    if moments:
        raise UserError(f"{path}/optimizer.safetensors has {foreign(min(moments))}, which is of no parameter")
    state, then = load_state(path)
    differs = {key: now for key, now in environment(model.device).items() if then.get(key) != now}
    changed = [f"{key} was {foreign(then.get(key))}, is {now}" for key, now in differs.items()]
    faults += [f"the run will not continue bit for bit: {', '.join(changed)}"] if changed else []
    return state, faults


def load_state(path: Path) -> tuple[State, dict[str, Any]]:
    """Where the run stood at an intact checkpoint, and its environment; `UserError` for what no run saves."""
    try:
        saved = read_json(path / "state.json")
        then = {"ranks": 1} | saved.pop("environment")  # as before runs could have several
        state = TypeAdapter(State).validate_python(saved)
        if path != path_of(path.parent, state.step) or state.scaler.keys() not in SCALERS:
            raise ValueError(f"step {state.step:,} or what scales the loss does not fit")
        return state, then
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = foreign(" ".join(str(error).split()), 200)
        raise UserError(f"{path}/state.json is none that a run saves: {reason}") from None


def load_weights(path: Path, model: GPT, may_lack: tuple[str, ...] = (), finite: bool = True) -> None:
    """Fill the model from an intact checkpoint; `UserError` for another model, or numbers not `finite`.

    Parameters whose names end as one of `may_lack` does may be missing, there or here: they stay as they are.
    """
    parameters = dict(model.named_parameters())
    saved = open_weights(path, parameters, may_lack)
    with torch.no_grad():
        for name in parameters.keys() & saved.keys():
            value = saved[name].read()
            if not value.is_floating_point() or (finite and not value.isfinite().all()):
                raise UserError(f"{path}: {name} has what are no finite floats")
            parameters[name].copy_(part_of(value.to(model.device), parameters[name]))


def refuse_other(path: Path, config: ModelConfig, vocab_size: int) -> None:
    """Raises `UserError` for weights of another model, without memory for it: a config may promise any."""
    if config.n_layer > len(open_tensors(path / "model.safetensors")):
        raise UserError(f"{path} holds another model than config gives: {config.n_layer:,} layers")
    refuse_long(config)
    open_weights(path, imagined(config, vocab_size))


def open_weights(path: Path, like: Mapping[str, Tensor], may_lack: tuple[str, ...] = ()) -> dict[str, Stored]:
    """The weights of an intact checkpoint, still in their file; `UserError` if `like` has other shapes."""
    saved = open_tensors(path / "model.safetensors")
    shapes = {name: [*tensor.shape] for name, tensor in like.items()}
    have = {name: stored.shape for name, stored in saved.items()}
    differ = [name for name in {**shapes, **have} if shapes.get(name) != have.get(name)]
    if wrong := [name for name in differ if not name.endswith(may_lack)]:
        told = f"{path} holds another model or vocabulary than config and data give: see"
        raise UserError(f"{told} {foreign(min(wrong))}")
    return saved


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is intact."""
    name = "checksums.json"
    try:
        sums = read_json(path / name)
        for name, expected in [(name, sums[name]) for name in FILES]:
            if sha256_of(path / name) != expected:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{name} is unreadable: {foreign(str(error), 200)}"
    return None


def _sweep(folder: Path) -> None:
    """Delete what a kill in the middle of a save or a removal has left."""
    for stale in folder.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _remove(path: Path) -> None:
    """Make a checkpoint invisible in one move, then delete it."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f"tmp-{path.name}")), ignore_errors=True)
