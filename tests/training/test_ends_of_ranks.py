"""How a rank ends when others, or torchrun, are gone: without processes, for what they do is given."""

import os
import signal
import sys

import pytest
import torch.distributed as dist

from configs import UserError
from training import Stopped, distributed
from training.guards import interruptible


@pytest.fixture
def rank(monkeypatch):
    """Makes this process one of two."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", gone)

    def be(number: int) -> None:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setattr(dist, "get_rank", lambda: number)

    return be


def gone(*_: object) -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:54995.")


def test_the_first_rank_has_done_its_work_when_it_waits_and_needs_nobody_any_more(rank):
    """Who is signalled while the page is made ends with 130, though the others have ended at once."""
    rank(0)
    with distributed.joined("cpu") as ranks:
        assert ranks.rank == 0


def test_another_tells_in_a_line_that_the_first_is_gone_while_it_waits_for_it(rank):
    rank(1)
    with (
        pytest.raises(distributed.Lost, match="another process of this run is gone"),
        distributed.joined("cpu"),
    ):
        pass


def test_what_no_rank_can_do_is_refused_when_they_have_met_so_that_it_is_told_once(rank, monkeypatch):
    rank(1)
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: met.append(1))
    with pytest.raises(UserError, match="mps is for one process"), distributed.joined("mps"):
        pass
    assert met


def test_a_message_is_shown_though_torchrun_is_gone_with_what_ranks_tell_each_other_by(monkeypatch, capsys):
    class Store:
        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes.")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Store)
    assert distributed.fail(Stopped("the disk is full")) == 1
    assert capsys.readouterr().err == "stopped: the disk is full\n"


@pytest.mark.parametrize(("number", "lines"), [(0, 1), (1, 0)])
def test_of_a_signal_to_all_ranks_the_first_alone_speaks(number, lines, rank, capfd):
    rank(number)
    with interruptible() as here:
        os.kill(os.getpid(), signal.SIGTERM)
        assert here()
    sys.stderr.flush()
    assert capfd.readouterr().err.count("ending after this step") == lines
