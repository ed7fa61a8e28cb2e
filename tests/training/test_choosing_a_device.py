"""Choosing a device, and taking a batch there."""

import pytest
import torch

from configs import UserError
from data.sources import Batch
from training.devices import choose_device, name_of, to_device

META = torch.device("meta")  # the one other device that every machine has


def have(monkeypatch, *names: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        ((), "auto", "cpu"),
        (("mps",), "auto", "cpu"),
        (("cuda",), "auto", "cuda"),
        (("cuda",), "cuda", "cuda"),
        (("mps",), "mps", "mps"),
        (("cuda", "mps"), "cpu", "cpu"),
    ],
)
def test_what_is_asked_is_taken_and_auto_takes_cuda_where_there_is_one(there, asked, expected, monkeypatch):
    have(monkeypatch, *there)
    assert choose_device(asked) == torch.device(expected)


@pytest.mark.parametrize(
    ("there", "asked", "named"),
    [((), "cuda", "cpu"), (("cuda",), "mps", "cpu, cuda"), (("mps",), "cuda", "mps")],
)
def test_a_device_that_is_not_there_is_refused_in_one_line_with_those_that_are(
    there, asked, named, monkeypatch
):
    have(monkeypatch, *there)
    with pytest.raises(UserError) as caught:
        choose_device(asked)
    message = str(caught.value)
    assert message.startswith(f"run.device {asked}: ")
    assert message.endswith(named)
    assert "\n" not in message


def test_a_chip_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert name_of(torch.device("cuda")) == "cuda H200"
    assert name_of(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("segment", [None, torch.zeros(2, 3)])
def test_a_batch_is_taken_there_whole(segment):
    moved = to_device(Batch(torch.zeros(2, 3), torch.ones(2, 3), segment), META)
    assert [part.device for part in moved if part is not None] == [META] * (2 if segment is None else 3)
    assert (moved.segment_BT is None) == (segment is None)


def test_a_batch_for_the_cpu_is_left_as_it_is():
    batch = Batch(torch.zeros(2, 3), torch.ones(2, 3))
    assert to_device(batch, torch.device("cpu")) is batch
