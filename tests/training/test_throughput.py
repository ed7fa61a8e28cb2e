"""Against what utilisation is measured, on a machine whose clock the test holds."""

import pytest
import torch

from training import throughput
from training.throughput import BUDGET, Meter, ceiling

CPU = torch.device("cpu")


class Machine:
    """Multiplies so many FLOP/s, after a latency, on its own clock; a run never sees the time of the test."""

    def __init__(self, speed: float, latency: float = 0.0):
        self.speed, self.latency, self.now, self.sizes = speed, latency, 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def linear(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(a))
        self.now += self.latency + 2 * len(a) ** 3 / self.speed
        return torch.zeros(1, 1)


@pytest.fixture
def on(monkeypatch):
    def measured_on(machine: Machine) -> float | None:
        monkeypatch.setattr(throughput, "time", machine)
        monkeypatch.setattr(throughput.F, "linear", machine.linear)
        return ceiling.__wrapped__(CPU, torch.float32)

    return measured_on


@pytest.mark.parametrize("speed", [1e9, 65e9, 500e9])
def test_the_ceiling_is_the_speed_of_the_machine_and_finding_it_takes_a_moment(speed, on):
    machine = Machine(speed)
    assert on(machine) == pytest.approx(speed)
    assert BUDGET <= machine.now < BUDGET * 1.3
    assert machine.sizes == sorted(machine.sizes)


def test_products_grow_until_the_way_to_the_device_no_longer_counts(on):
    assert on(Machine(1e12, latency=1e-4)) == pytest.approx(1e12, rel=0.1)


def test_where_a_precision_cannot_be_multiplied_there_is_no_ceiling(monkeypatch):
    def refuse(*_):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(throughput.F, "linear", refuse)
    assert ceiling.__wrapped__(CPU, torch.float16) is None


def test_measuring_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    assert ceiling.__wrapped__(CPU, torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_utilisation_is_the_flops_of_all_updates_since_the_last_reading_over_the_ceiling():
    meter = Meter(flops_per_token=50, ceiling=4000.0)
    meter.count(60, 2.0)
    meter.count(60, 4.0)
    assert meter.read() == {"tokens_per_s": 20, "mfu": pytest.approx(20 * 50 / 4000)}
    meter.count(60, 1.0)
    assert meter.read() == {"tokens_per_s": 60, "mfu": pytest.approx(0.75)}


def test_what_was_reached_is_possible_so_utilisation_never_passes_1():
    meter = Meter(flops_per_token=50, ceiling=4000.0)
    meter.count(600, 1.0)
    assert meter.read()["mfu"] == 1


def test_without_a_ceiling_there_is_a_rate_but_no_utilisation():
    meter = Meter(flops_per_token=50, ceiling=None)
    meter.count(3000, 1.5)
    assert meter.read() == {"tokens_per_s": 2000, "mfu": None}
