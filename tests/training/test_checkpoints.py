"""Checkpoints: bit-exact, complete or invisible, checked before use, rotated without losing what counts."""

import ast
import contextlib
import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Checkpoint, Model, Optimizer
from model.transformer import GPT
from training import Stopped, checkpoints
from training.checkpoints import (
    State,
    find_intact,
    is_log_spaced,
    load_newest,
    path_of,
    prune,
    save,
    steps_in,
)
from training.optimizers import make_optimizers

ROOT = Path(__file__).parents[2]
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


def make(name: str = "muon", seed: int = 1, **values) -> tuple[GPT, list[torch.optim.Optimizer]]:
    shape = {"n_layer": 2, "n_head": 2, "d_model": 8, "context_length": 17, **values}
    model = GPT(Model(**shape), 11, torch.Generator().manual_seed(seed))
    return model, make_optimizers(model, Optimizer(name=name, lr=0.01))


def train(model: GPT, optimizers: list[torch.optim.Optimizer], *seeds: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def weights(model: GPT) -> dict[str, bytes]:
    return {name: parameter.detach().numpy().tobytes() for name, parameter in model.named_parameters()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def two(tmp_path) -> Path:
    """A folder with checkpoints of the steps 1 and 2, which differ."""
    model, optimizers = make()
    for step in (1, 2):
        train(model, optimizers, step)
        save(tmp_path, model, optimizers, State(step=step))
    return tmp_path


# Bit for bit


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "values",
    [{}, {"tie_embeddings": True, "bias": True, "position": "learned"}, {"sink": "learned", "gate": True}],
    ids=str,
)
def test_a_loaded_run_is_the_saved_one_and_goes_on_as_it_would_have(name, values, tmp_path):
    model, optimizers = make(name, **values)
    train(model, optimizers, 1, 2)
    state = State(step=2, tokens=34, seconds=0.1, best=(1 / 7, 2), fingerprint="data")
    save(tmp_path, model, optimizers, state)
    again, its_optimizers = make(name, seed=2, **values)
    assert weights(again) != weights(model)
    found, faults = load_newest(tmp_path, again, its_optimizers)
    assert asdict(found) == asdict(state)
    assert faults == []
    assert weights(again) == weights(model)
    train(model, optimizers, 3, 4)
    train(again, its_optimizers, 3, 4)
    assert weights(again) == weights(model)
    for folder, pair in (("a", (model, optimizers)), ("b", (again, its_optimizers))):
        save(tmp_path / folder, *pair, state)  # the moments too
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_moments_matter(tmp_path):
    """Else the test above would show nothing."""
    model, optimizers = make()
    train(model, optimizers, 1, 2)
    save(tmp_path, model, optimizers, State(step=2))
    again, _ = make(seed=2)
    load_newest(tmp_path, again, make_optimizers(again, Optimizer(name="muon", lr=0.01)))
    train(model, optimizers, 3)
    train(again, make_optimizers(again, Optimizer(name="muon", lr=0.01)), 3)
    assert weights(again) != weights(model)


def test_saving_does_not_touch_the_run():
    model, optimizers = make()
    train(model, optimizers, 1)
    other, its_optimizers = make()
    train(other, its_optimizers, 1)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), model, optimizers, State(step=1))
    train(model, optimizers, 2)
    train(other, its_optimizers, 2)
    assert weights(model) == weights(other)


def test_a_checkpoint_is_four_files_without_anything_beside_it(two):
    assert sorted(contents(two)) == sorted(f"step-0000000{step}/{name}" for step in (1, 2) for name in FILES)


# Damage


def test_one_flipped_bit_anywhere_leads_back_to_the_checkpoint_before_with_a_word(two):
    broken = path_of(two, 2)
    whole = {name: (broken / name).read_bytes() for name in FILES}
    model, optimizers = make()
    train(model, optimizers, 1)

    @given(st.sampled_from(FILES), st.integers(0, 2**30), st.integers(0, 7))
    def check(name, place, bit):
        content = bytearray(whole[name])
        content[place % len(content)] ^= 1 << bit
        try:
            (broken / name).write_bytes(content)
            again, its_optimizers = make(seed=2)
            state, faults = load_newest(two, again, its_optimizers)
        finally:
            (broken / name).write_bytes(whole[name])
        assert state.step == 1
        assert weights(again) == weights(model)
        assert len(faults) == 1
        assert str(broken) in faults[0]
        assert name == "checksums.json" or f"({name} does not match" in faults[0]
        assert faults[0].endswith("; going back to step-00000001")
        assert "\n" not in faults[0]

    check()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def from_the_other(path: Path) -> None:
    shutil.copy(path.parents[1] / "step-00000001" / path.name, path)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, truncate, empty, from_the_other, become_a_folder])
def test_a_missing_cut_or_mixed_file_leads_back_to_the_checkpoint_before(two, name, damage):
    damage(path_of(two, 2) / name)
    state, faults = load_newest(two, *make(seed=2))
    assert state.step == 1
    assert len(faults) == 1
    assert faults[0].startswith(f"{path_of(two, 2)} is damaged ({name} ") or damage is from_the_other
    assert faults[0].endswith("; going back to step-00000001")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_anywhere_is_found_out(two, name):
    path = path_of(two, 2) / name
    whole = path.read_bytes()
    cuts = [*range(0, len(whole), max(1, len(whole) // 50)), len(whole) - 1]
    for content in [*(whole[:cut] for cut in cuts), whole + b"\0", whole + whole, b"\0" * len(whole)]:
        path.write_bytes(content)
        found, faults = find_intact(two)
        assert (found, len(faults)) == (path_of(two, 1), 1)
        assert name == "checksums.json" or f"({name} does not match" in faults[0]


def test_a_checkpoint_that_is_a_file_is_damaged(two):
    shutil.rmtree(path_of(two, 2))
    path_of(two, 2).touch()
    assert find_intact(two)[0] == path_of(two, 1)


def test_the_fault_of_each_that_is_passed_over_is_told_and_once_what_is_used(two):
    save(two, *make(), State(step=3))
    truncate(path_of(two, 3) / "state.json")
    (path_of(two, 2) / "checksums.json").unlink()
    assert find_intact(two)[1] == [
        f"{path_of(two, 3)} is damaged (state.json does not match its checksum)",
        f"{path_of(two, 2)} is damaged (checksums.json is missing); going back to step-00000001",
    ]


def test_what_else_lies_in_a_checkpoint_does_not_matter(two):
    (path_of(two, 2) / "notes.md").write_text("the good one")
    assert find_intact(two) == (path_of(two, 2), [])


def test_where_nothing_is_intact_every_fault_is_told(two):
    (path_of(two, 1) / "model.safetensors").unlink()
    empty(path_of(two, 2) / "checksums.json")
    with pytest.raises(UserError) as caught:
        load_newest(two, *make())
    assert "\n" not in str(caught.value)
    assert str(path_of(two, 1)) in str(caught.value)
    assert str(path_of(two, 2)) in str(caught.value)


@pytest.mark.parametrize("left", [(), ("model.safetensors",)])
def test_weights_alone_are_no_checkpoint_and_what_is_missing_is_named(tmp_path, left):
    model, optimizers = make()
    save(tmp_path, model, optimizers, State(step=3))
    for name in set(FILES) - set(left):
        (path_of(tmp_path, 3) / name).unlink()
    with pytest.raises(UserError, match="missing") as caught:
        load_newest(tmp_path, model, optimizers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [{"d_model": 16}, {"n_layer": 3}, {"n_layer": 1}, {"bias": True}, {"sink": "learned"}, {"gate": True}],
    ids=str,
)
def test_weights_of_another_model_are_refused_with_both_shapes(two, other):
    model, optimizers = make(**other)
    before = weights(model)
    with pytest.raises(UserError, match="another model"):
        load_newest(two, model, optimizers)
    assert weights(model) == before


# Writing


def stop_in(monkeypatch, what: str, error: BaseException) -> None:
    """Let the second use of one step of saving fail, so that something is written already."""
    owner = {"save_file": checkpoints, "fsync": os, "rename": Path, "write_text": Path}[what]
    original, calls = getattr(owner, what), []

    def failing(*arguments, **keywords):
        calls.append(1)
        if len(calls) == (1 if what == "rename" else 2):
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, what, failing)


def test_a_run_folder_that_is_gone_is_not_made_anew(tmp_path):
    with pytest.raises(Stopped, match=r"step 3.*No such file"):
        save(tmp_path / "gone" / "checkpoints", *make(), State(step=3))
    assert [*tmp_path.iterdir()] == []


STEPS_OF_SAVING = pytest.mark.parametrize("what", ["save_file", "write_text", "fsync", "rename"])


@STEPS_OF_SAVING
def test_a_save_that_fails_stops_the_run_and_leaves_the_earlier_ones(two, what, monkeypatch):
    before = contents(two)
    with monkeypatch.context() as patch:
        stop_in(patch, what, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(Stopped, match=r"step 3.*No space left on device"):
            save(two, *make(), State(step=3))
    assert contents(two) == before
    assert load_newest(two, *make())[0].step == 2


@pytest.mark.parametrize("size", [10, 1000, 5000])
def test_a_disk_that_takes_no_more_stops_the_run_and_leaves_the_earlier_ones(two, size):
    """The operating system's own refusal, wherever it comes from: a limit on the size of files."""
    before, model = contents(two), make()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        with pytest.raises(Stopped, match=r"step 3.*File too large"):
            save(two, *model, State(step=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(two) == before


@STEPS_OF_SAVING
def test_a_kill_while_saving_leaves_the_earlier_ones_and_traces_that_are_swept(two, what, monkeypatch):
    before = contents(two)
    with monkeypatch.context() as patch:
        stop_in(patch, what, KeyboardInterrupt())  # nothing tidies up after it, as after SIGKILL
        with pytest.raises(KeyboardInterrupt):
            save(two, *make(), State(step=3))
    assert contents(two) != before
    assert steps_in(two) == [1, 2]
    state, faults = load_newest(two, *make())
    assert (state.step, faults) == (2, [])
    assert contents(two) == before
    save(two, *make(), State(step=3))
    assert steps_in(two) == [1, 2, 3]
    assert sorted(path.name for path in two.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_a_kill_while_removing_leaves_nothing_half_removed_in_sight(two, monkeypatch):
    def kill(path, *arguments, **keywords):
        next(iter(Path(path).iterdir())).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            prune(two, Checkpoint(keep_last=1), None)
    assert steps_in(two) == [2]
    save(two, *make(), State(step=3))
    assert sorted(path.name for path in two.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(two):
    empty(path_of(two, 2) / "model.safetensors")
    model, optimizers = make(seed=5)
    save(two, model, optimizers, State(step=2))
    again, its_optimizers = make()
    assert load_newest(two, again, its_optimizers)[1] == []
    assert weights(again) == weights(model)


# Rotation


def test_log_spaced_steps_are_powers_of_two_and_then_every_512():
    assert [step for step in range(2100) if is_log_spaced(step)] == [
        0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048
    ]  # fmt: skip


LOSSES = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.5, 4))


@given(
    saved=st.lists(st.tuples(st.integers(1, 300), LOSSES), min_size=1, max_size=10),
    keep_last=st.integers(1, 4),
    keep_best=st.booleans(),
    log_spaced=st.booleans(),
)
def test_rotation_keeps_the_newest_the_best_and_the_log_spaced_and_nothing_else(
    saved, keep_last, keep_best, log_spaced
):
    config = Checkpoint(keep_last=keep_last, keep_best=keep_best, log_spaced=log_spaced)
    losses, step, best, model = {}, 0, None, make()[0]
    memory = Path("/dev/shm")  # where there is one, hundreds of saves take a tenth of the time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        for gap, loss in saved:
            step += gap
            losses[step] = loss
            if loss is not None and (best is None or loss < losses[best]):
                best = step
            save(folder, model, [], State(step=step))
            prune(folder, config, best)
            left = steps_in(folder)
            rules = {*list(losses)[-keep_last:]}
            rules |= {step for step in losses if log_spaced and is_log_spaced(step)}
            rules |= {best} if keep_best and best else set()
            assert set(left) == rules
            assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in left]


@pytest.mark.parametrize(
    "name", ["tmp-3-99", "step-3", "step-00000003.part", "step-000000003", "step-0000000x", "best"]
)
def test_only_whole_step_names_are_checkpoints(two, name):
    shutil.copytree(path_of(two, 2), two / name)
    assert steps_in(two) == [1, 2]


# Loading runs no code


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", FILES)
def test_code_in_a_file_is_never_run(two, name, tmp_path_factory):
    mark = tmp_path_factory.mktemp("mark") / "run"
    path = path_of(two, 2)
    (path / name).write_bytes(pickle.dumps(Bomb(mark)))
    sums = {file: hashlib.sha256((path / file).read_bytes()).hexdigest() for file in FILES[:3]}
    if name != "checksums.json":
        (path / "checksums.json").write_text(json.dumps(sums))
    with contextlib.suppress(Exception):
        load_newest(two, *make())
    assert not mark.exists()
    pickle.loads((path / name).read_bytes())
    assert mark.exists()  # so the code was there to be run


PACKAGES = ("configs", "data", "model", "analysis", "training", "scripts")


@pytest.mark.parametrize(
    "path",
    [ROOT / "train.py", *(path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_source_unpickles_or_evaluates(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not {"pickle", "shelve", "marshal", "dill", "joblib"} & names
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
            assert called not in (
                "torch.load",
                "load_state_dict_from_url",
                "yaml.unsafe_load",
                "yaml.full_load",
            )
            assert called != "yaml.load" or ast.unparse(node.args[1]) == "_UniqueKeys"  # a SafeLoader
            assert not {"allow_pickle", "trust_remote_code", "shell"} & {word.arg for word in node.keywords}
