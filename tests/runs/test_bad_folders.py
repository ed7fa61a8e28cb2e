"""A run folder that moves, goes, cannot be written or read, or is full: one line, and nothing is lost."""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from configs.cli import parse
from tests.runs.killing import done
from tests.runs.tiny import ROOT, assert_same, before_update, contents, go_on, request, start, steps


def the_line(told: str, beginning: str) -> str:
    """The one line that says why it ended."""
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith(("stopped:", "error:"))]
    assert line.startswith(beginning)
    return line


# Gone


def strike(folder: Path, monkeypatch, act, **sections) -> int:
    with monkeypatch.context() as patch:
        before_update(patch, 8, lambda run: act(run.folder))
        return train.main(parse(request(folder, **sections)))


RARE = pytest.mark.parametrize(
    "rare",
    [{}, {"log": {"every": 1000}, "eval": {"every": 0}, "probe": {"every": 0}}],
    ids=["often", "seldom"],
)


@RARE
def test_a_run_that_is_moved_while_it_trains_stops_at_once_and_goes_on_from_its_new_place(
    rare, tmp_path, monkeypatch, capsys
):
    (tmp_path / "reference").mkdir()
    reference, new = start(tmp_path / "reference", **rare), tmp_path / "new"
    capsys.readouterr()
    assert strike(tmp_path, monkeypatch, lambda run: run.rename(new), **rare) == 1
    assert "--resume from its new place" in the_line(capsys.readouterr().err, "stopped: ")
    assert not (tmp_path / "run").exists()
    assert steps(new)[-1] == 5
    assert go_on(new) == 0
    assert_same(new, reference)


@RARE
def test_a_run_that_is_removed_while_it_trains_stops_and_does_not_come_back_in_part(
    rare, tmp_path, monkeypatch, capsys
):
    assert strike(tmp_path, monkeypatch, shutil.rmtree, **rare) == 1
    assert str(tmp_path / "run") in the_line(capsys.readouterr().err, "stopped: ")
    assert not (tmp_path / "run").exists()


def test_a_failed_step_does_not_bring_a_moved_run_back_in_part(tmp_path, monkeypatch, capsys):
    def act(folder: Path) -> None:
        folder.rename(tmp_path / "new")
        monkeypatch.setattr(train.math, "isfinite", lambda number: False)

    assert strike(tmp_path, monkeypatch, act) == 1
    assert "its batch could not be kept" in the_line(capsys.readouterr().err, "stopped: step 8")
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_place_of_one_that_was_moved_is_not_written_to(
    reference, tmp_path, monkeypatch, capsys
):
    before = contents(reference("muon"))

    def replace(run: Path) -> None:
        run.rename(tmp_path / "new")
        shutil.copytree(reference("muon"), run)

    assert strike(tmp_path, monkeypatch, replace) == 1
    the_line(capsys.readouterr().err, "stopped: ")
    assert contents(tmp_path / "run") == before
    assert go_on(tmp_path / "new") == 0
    assert_same(tmp_path / "new", reference("adamw"))


def test_checkpoints_that_are_removed_while_it_trains_are_made_again(reference, tmp_path, monkeypatch):
    assert strike(tmp_path, monkeypatch, lambda run: shutil.rmtree(run / "checkpoints")) == 0
    assert_same(tmp_path / "run", reference("adamw"))


@pytest.mark.usefixtures("wandb_alone")
def test_weights_and_biases_does_not_bring_a_removed_run_back(tmp_path, monkeypatch, capsys):
    assert strike(tmp_path, monkeypatch, shutil.rmtree, log={"wandb": "offline"}) == 1
    the_line(capsys.readouterr().err, "stopped: ")
    assert not (tmp_path / "run").exists()


# Cut off


def test_the_records_up_to_a_checkpoint_are_on_the_disk_before_it_is(tmp_path, monkeypatch):
    """So a machine that loses its power keeps none without the other."""
    fsync, rename, flushed, seen = os.fsync, Path.rename, {}, []

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def renaming(path: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            records = (tmp_path / "run" / "metrics.jsonl").stat()
            assert flushed[records.st_ino] == records.st_size
            assert {file.stat().st_ino for file in (path, *path.iterdir())} <= flushed.keys()
            flushed.pop(target.parent.stat().st_ino, None)  # it is to be flushed once this is in it
            seen.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "rename", renaming)
    start(tmp_path, log={"every": 3})
    assert len(seen) == 5
    assert seen[-1].parent.stat().st_ino in flushed


# Not to be written or read: the tests may belong to root, whom no mode stops


def without_powers(act):
    """The same by someone whom the modes of files concern, also where root runs the tests."""

    def acting() -> int:
        if os.geteuid() == 0:
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
            assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0
        return act()

    return acting


def outcome(argv: list[str], folder: Path) -> tuple[int, str]:
    code = done(without_powers(lambda: train.main(parse(argv))), folder / "told.txt")
    return code, (folder / "told.txt").read_text()


def test_where_no_folder_can_be_made_a_run_is_refused(tmp_path):
    argv = request(tmp_path, run={"dir": tmp_path / "closed" / "run"})
    (tmp_path / "closed").mkdir(mode=0o500)
    code, told = outcome(argv, tmp_path)
    assert code == 2
    assert "Permission denied" in the_line(told, "error: cannot write to run.dir")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("closed", "exit_code", "line"),
    [
        (".", 2, "error: cannot write to run.dir"),
        ("checkpoints", 1, "stopped: cannot save the checkpoint of"),
    ],
)
def test_a_run_that_may_not_be_written_stops_in_one_line_and_goes_on_later(
    closed, exit_code, line, reference, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        before_update(patch, 8, lambda run: os.kill(os.getpid(), signal.SIGINT))
        assert train.main(parse(request(tmp_path))) == 130
    run = tmp_path / "run"
    (run / closed).chmod(0o500)
    code, told = outcome(["--resume", str(run)], tmp_path)
    assert code == exit_code
    assert str(run) in the_line(told, line)
    (run / closed).chmod(0o700)
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))


@pytest.mark.parametrize("name", ["model.safetensors", "checksums.json", ""])
def test_a_checkpoint_that_may_not_be_read_is_named_and_the_one_before_is_used(name, reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    newest = run / "checkpoints" / "step-00000020"
    (newest / name).chmod(0)
    code, told = outcome(["--resume", str(run)], tmp_path)
    (line,) = [line for line in told.splitlines() if line.startswith("warning:")]
    assert all(
        word in line for word in (str(newest), name or "checksums.json", "going back to step-00000015")
    )
    assert f"{run}, going on after step 15\n" in told
    assert code == 0
    for left in (run / "checkpoints").glob("tmp-*"):  # it could be put aside, but not looked into
        left.chmod(0o700)
        shutil.rmtree(left)
    assert_same(run, reference("adamw"))


# Full


@pytest.mark.parametrize(
    "size",
    [2_000, 5_000, 8_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (3_000, 4_000, 6_000, 7_000))],
)
def test_records_that_find_no_room_stop_the_run_in_one_line_and_it_goes_on_later(size, reference, tmp_path):
    def act() -> int:
        before, update = resource.getrlimit(resource.RLIMIT_FSIZE)[1], train.update

        def updating(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before))
            return update(*arguments)

        train.update = updating
        return train.main(parse(request(tmp_path)))

    told = tmp_path / "told.txt"
    assert done(act, told) == 1
    the_line(told.read_text(), "stopped: cannot ")
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


SMALL_DISK = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
@pytest.mark.parametrize("size", [200_000, 400_000, 700_000])
def test_a_disk_that_is_really_full_stops_the_run_in_one_line(size, tmp_path):
    (tmp_path / "disk").mkdir()
    run = {"dir": tmp_path / "disk" / "run"}
    more = {"log": {"wandb": "offline"}, "checkpoint": {"every": 1, "keep_last": 100}, "train": {"steps": 50}}
    disk = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        SMALL_DISK,
        "-",
        str(size),
        tmp_path / "disk",
    ]
    if subprocess.run([*disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    argv = request(tmp_path, run=run, **more)
    command = [*disk, sys.executable, "train.py", *argv]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert told.returncode in (1, 2)
    assert "No space left on device" in the_line(told.stderr, "stopped: cannot ")
