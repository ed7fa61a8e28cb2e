"""A preparation comes to the same bytes however often it is killed, by one process, in bounded memory."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from data import preparation, writer
from data.bpe import train_bpe
from data.preparation import prepared_text
from tests.data.corpus import asked, contents, jsonl, prepared, read, texts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize("source", ["hf", "text"])
def test_a_kill_at_whatever_write_changes_no_byte_of_what_comes_out(source, tmp_path, monkeypatch):
    """In this process, with an exception that nothing handles in the place of a kill."""
    rows = [*texts(60), None, ""]
    path = jsonl(tmp_path / "a.jsonl", rows)
    values = {"path": str(path), "val_fraction": 0.3, "tokenizer": "bpe", "vocab_size": 270}
    trained = train_bpe(texts(60), 270, True)

    def made(folder: Path) -> Path:
        if source == "hf":
            return prepared(asked(folder, **values))
        return prepared_text(asked(folder, **{**values, "source": "text"}), 1, "".join(texts(60)), trained)

    whole = contents(made(tmp_path / "whole"))
    writes = [(writer.Writer, "_append"), (writer, "to_disk"), (Path, "replace"), (Path, "rename")]
    writes += [(Path, "unlink"), (os, "truncate"), (Path, "write_text")]
    left = 0

    class Killed(BaseException):
        pass

    def fatal(function):
        def call(*arguments, **keywords):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*arguments, **keywords)

        return call

    for owner, name in writes:
        monkeypatch.setattr(owner, name, fatal(getattr(owner, name)))
    left, kills, rng = 0, 0, random.Random(0)
    for first in range(1, 160, 9) if source == "hf" else range(1, 50):
        left = first
        while True:
            try:
                folder = made(tmp_path / f"{first}")
                break
            except Killed:
                kills += 1
                left = rng.randrange(5, 60)
        left = 0
        assert contents(folder) == whole
        assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]
    assert kills > 20


def test_what_was_done_before_a_kill_is_not_done_again(tmp_path, monkeypatch):
    """Neither the tokenizer once it is trained, nor the tokens once all are there."""
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    data = asked(tmp_path, path=str(path), val_fraction=0.3, tokenizer="bpe", vocab_size=270)

    def kill(*arguments, **keywords):
        raise KeyboardInterrupt

    for owner, name in ((writer.Writer, "save"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, kill)
            with pytest.raises(KeyboardInterrupt):
                prepared(data)
        monkeypatch.setattr(preparation, "train_bpe", kill)
    monkeypatch.setattr(preparation, "Corpus", kill)
    assert sum(map(len, read(prepared(data)).values())) == 99


PREPARE = """
import sys
from configs.schema import Data
from data import preparation, writer
writer.SHARD, preparation.BATCH, writer.SAVE_EVERY = 300_000, 20_000, 50_000
data = Data(source="hf", tokenizer="byte", val_fraction=0.1, path=sys.argv[1], cache_dir=sys.argv[2])
print(preparation.prepared(data, 1))
"""


def start(path: Path, cache: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, str(path), str(cache)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    known = {**os.environ, "HF_HOME": str(cache.parent / "home"), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=known, **pipes)


def finish(process: subprocess.Popen) -> Path:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return Path(out.strip())


def written(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("tmp-*/*.bin"))


def kill_at(process: subprocess.Popen, cache: Path, size: int) -> bool:
    """SIGKILL once so much is on the disk."""
    while process.poll() is None:
        try:
            if written(cache) >= size:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                return True
        except FileNotFoundError:  # renamed as we looked
            pass
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_processes_leave_what_another_goes_on_with(kills, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(8_000))
    whole = contents(finish(start(path, tmp_path / "whole" / "cache")))
    size, cache = sum(map(len, whole.values())), tmp_path / "killed" / "cache"
    rng, killed = random.Random(kills), 0
    for i in range(kills):
        killed += kill_at(start(path, cache), cache, size * (i + rng.random()) // (kills + 1))
        assert (
            not [path for path in cache.iterdir() if path.name[:4] != "tmp-" and path.suffix != ".lock"]
            or killed <= i
        )
    assert killed
    folder = finish(start(path, cache))
    assert contents(folder) == whole
    assert os.listdir(cache) == [folder.name]


def test_processes_that_prepare_the_same_at_once_prepare_it_once(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(5_000))
    processes = [start(path, tmp_path / "cache") for _ in range(3)]
    folders = {finish(process) for process in processes}
    assert len(folders) == 1
    assert os.listdir(tmp_path / "cache") == [folders.pop().name]


def test_a_process_waits_for_the_one_that_prepares_and_takes_over_from_the_dead(tmp_path):
    path, cache = jsonl(tmp_path / "a.jsonl", texts(8_000)), tmp_path / "cache"
    assert kill_at(start(path, cache), cache, 1)
    (temporary,), (lock,) = cache.glob("tmp-*"), cache.glob("*.lock")
    before = contents(temporary)
    with FileLock(lock):  # as the dead one had it
        second = start(path, cache)
        assert "waiting for the process" in second.stderr.readline()
        assert contents(temporary) == before
    assert sum(map(len, read(finish(second)).values())) == 8_000
    assert os.listdir(cache) == [temporary.name.removeprefix("tmp-")]


@pytest.mark.slow
def test_when_the_one_that_prepares_is_killed_those_that_wait_finish_it(tmp_path):
    path, cache = jsonl(tmp_path / "a.jsonl", texts(8_000)), tmp_path / "cache"
    whole = contents(finish(start(path, tmp_path / "whole")))
    first = start(path, cache)
    while not written(cache):
        assert first.poll() is None
    others = [start(path, cache) for _ in range(2)]
    first.send_signal(signal.SIGSTOP)  # so that it has not ended before they come
    for other in others:
        assert "waiting for the process" in other.stderr.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    folders = {finish(other) for other in others}
    assert [contents(folder) for folder in folders] == [whole]
    assert os.listdir(cache) == [path.name for path in folders]


# Memory


MEASURE = PREPARE.replace("300_000, 20_000, 50_000", "2**26, 2**20, 2**24").replace(
    "print(preparation.prepared(data, 1))",
    """
try:
    preparation.prepared(data, 1)
except Exception as error:
    assert "has 0 in 0 documents, of 1 in all: " in str(error), error
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak) // 1024)
""",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_text(suffix, tmp_path):
    """A line without end, and documents of 100 kB."""
    peaks = []
    for megabytes in (30, 150):
        path = tmp_path / f"{megabytes}.{suffix}"
        if suffix == "txt":
            path.write_text("abcdefgh" * (megabytes * 125_000))
        else:
            jsonl(path, [f"{i} " + "x" * 100_000 for i in range(megabytes * 10)])
        command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / f"cache{megabytes}")]
        known = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40
    assert peaks[1] < 500
