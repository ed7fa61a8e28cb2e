"""How many processes share a step: as torchrun says, a part of the configuration, never silently another."""

import time

import pytest

from configs.cli import load_config, parse, parse_or_exit, to_yaml
from configs.ranks import Ranks, is_first, processes
from tests.configs.asked import config, refused


@pytest.fixture
def started(monkeypatch):
    """As if torchrun had started so many."""

    def by(ranks: int, rank: int = 0) -> None:
        for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": ranks, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))

    return by


def saved(folder, *argv: str):
    (folder / "config.yaml").write_text(to_yaml(config(*argv)))
    return folder


def test_processes_are_those_of_torchrun_and_of_nothing_else(started, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # a scheduler's
    assert (processes(), is_first()) == (1, True)
    started(3, rank=1)
    assert (processes(), is_first()) == (3, False)
    started(3, rank=0)
    assert is_first()


def test_a_configuration_says_how_many_share_a_step_and_the_batch_is_that_of_all(started):
    batch = ("--train.batch_size", "3", "--train.grad_accum", "2")
    assert (config(*batch).train.ranks, config(*batch).global_batch) == (1, 6)
    started(4)
    assert (config(*batch).train.ranks, config(*batch).global_batch) == (4, 24)


@pytest.mark.parametrize(("here", "asked"), [(1, 2), (4, 2), (2, 8)])
def test_another_number_than_there_are_is_refused_with_keys_that_keep_the_batch(here, asked, started):
    started(here)
    batch = ("--train.batch_size", "6", "--train.grad_accum", "2")
    message = refused("--train.ranks", str(asked), *batch)
    assert f"torchrun --standalone --nproc-per-node {asked}" in message
    words = message[message.index("--train.") :].removesuffix(" keeps the batch").split()
    assert config(*words).global_batch == 12 * asked


def test_one_process_is_asked_for_without_torchrun(started):
    started(2)
    message = refused("--train.ranks", "1")
    assert message.startswith("train.ranks 1 is one process, not the 2 here: start it without torchrun; ")


def test_a_configuration_is_printed_whatever_number_it_asks_for():
    argv = ["--train.ranks", "8", "--print_config"]
    assert parse(argv).config.train.ranks == 8


def test_of_several_processes_one_tells_what_is_wrong_and_another_leaves_it_the_time_to(
    started, monkeypatch, capsys
):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for rank in (0, 1):
        started(2, rank)
        with pytest.raises(SystemExit, match="2"):
            parse_or_exit(["--train.steps", "0"])
        assert len(waits) == rank
        capsys.readouterr()
        with pytest.raises(SystemExit, match="0"):
            parse_or_exit(["--print_config"])
        assert ("steps: 1000" in capsys.readouterr().out) == (rank == 0)


def test_a_dry_run_may_foresee_more_processes_than_there_are():
    assert parse(["--train.ranks", "64", "--dry_run"]).config.global_batch == 64 * 32


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 3)])
def test_a_run_goes_on_by_any_number_that_keeps_its_batch_and_is_told_how(then, now, started, tmp_path):
    started(then)
    folder = saved(tmp_path, "--train.batch_size", "6", "--train.grad_accum", "2")
    started(now)
    message = refused("--resume", str(folder))
    assert f"a step of this run has {12 * then} sequences, here it would have {12 * now}" in message
    words = message[message.index("--train.") :].removesuffix(" keeps the batch").split()
    again = config("--resume", str(folder), *words)
    assert (again.global_batch, again.train.ranks) == (12 * then, now)
    assert again.train.batch_size == max(n for n in (1, 2, 3, 6) if 12 * then // now % n == 0)


def test_a_number_that_cannot_share_the_batch_is_told_so(started, tmp_path):
    folder = saved(tmp_path, "--train.batch_size", "4")
    started(3)
    assert refused("--resume", str(folder)).endswith("3 cannot share its 4 sequences a step")


def test_a_run_from_before_there_were_ranks_was_made_by_one(started, tmp_path):
    folder = saved(tmp_path)
    path = folder / "config.yaml"
    path.write_text("\n".join(line for line in path.read_text().split("\n") if "ranks" not in line))
    started(2)
    assert load_config(folder).global_batch == 32
    assert "32 sequences, here it would have 64" in refused("--resume", str(folder))


def test_each_thing_that_is_shared_out_is_one_ranks():
    for number in (1, 2, 5):
        assert all(sum(Ranks(rank, number).has(i) for rank in range(number)) == 1 for i in range(12))
