"""Compiled runs: the same numbers but for rounding, plain checkpoints, probes of the plain model."""

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import cpp_builder

import train
from configs.cli import parse
from tests.runs.test_refusals import refused
from tests.runs.tiny import before_update, go_on, interrupted, records, request, start, steps

COMPILED = {"train": {"compile": "true"}, "model": {"dropout": 0}}
EAGER = {"model": {"dropout": 0}}
compile_for_real = torch.compile


@pytest.fixture
def quickly(monkeypatch):
    """Traced as always, but what was traced is run by PyTorch as it is: no compiler, no wait."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", lambda model: compile_for_real(model, backend="eager"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "none is needed")
    yield
    torch._dynamo.reset()


def tensors(run, step: int) -> set[str]:
    path = run / "checkpoints" / f"step-{step:08d}"
    names = set()
    for file in ("model.safetensors", "optimizer.safetensors"):
        with safe_open(path / file, "pt") as saved:
            names |= set(saved.keys())
    return names


def test_a_compiled_run_has_the_records_and_checkpoints_of_a_plain_one(quickly, tmp_path, capsys):
    for name in ("plain", "compiled"):
        (tmp_path / name).mkdir()
    plain, often = start(tmp_path / "plain", **EAGER), {"probe": {"every": 1}, "eval": {"every": 1}}
    assert "torch.compile" not in capsys.readouterr().out
    run = start(tmp_path / "compiled", **COMPILED, **often)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "torch.compile" in line]
    assert "first step" in line
    # One graph for all steps: neither probes nor evaluations in between made PyTorch trace anew.
    assert counters["stats"]["unique_graphs"] == 1
    for kind in ("train", "eval"):
        of = {one: {record["step"]: record["loss"] for record in records(one, kind)} for one in (plain, run)}
        assert of[plain] == pytest.approx({step: of[run][step] for step in of[plain]}, abs=1e-5)
    found = records(run, "attention")
    assert [record["step"] for record in found] == list(range(21))
    assert found[-1]["scores"].keys() == records(plain, "attention")[-1]["scores"].keys()
    assert tensors(run, 20) == tensors(plain, 20)
    assert not any("_orig_mod" in name for name in tensors(run, 20))


@pytest.mark.parametrize("first", [True, False])
def test_a_run_may_be_compiled_before_it_goes_on_or_after(first, quickly, tmp_path, monkeypatch):
    run = interrupted(tmp_path, monkeypatch, 10, **(COMPILED if first else EAGER))
    assert go_on(run, "--train.compile", str(not first).lower()) == 0
    assert steps(run)[-1] == 20
    assert counters["stats"]["unique_graphs"] == 1
    losses = [record["loss"] for record in records(run, "train")]
    (tmp_path / "plain").mkdir()
    plain = [record["loss"] for record in records(start(tmp_path / "plain", **EAGER), "train")]
    assert losses == pytest.approx(plain, abs=1e-5)


def test_a_number_that_is_not_finite_is_named_in_a_compiled_run_too(quickly, tmp_path, monkeypatch, capsys):
    def act(run):
        run.model.get_parameter("blocks.1.attention.W_q.weight").data[0, 0] = float("nan")

    before_update(monkeypatch, 3, act)
    assert train.main(parse(request(tmp_path, **COMPILED))) == 1
    assert "parameter layer 1, attention.W_q" in capsys.readouterr().err


def test_without_a_compiler_a_compiled_run_on_a_cpu_is_refused_before_its_folder_is_made(tmp_path, capsys):
    argv = request(tmp_path, **COMPILED)
    with inductor.patch("cpp.cxx", (None, "no-such-compiler")):
        message = refused(argv, tmp_path / "run", capsys)
        assert "train.compile needs a C++ compiler on a CPU" in message
        start(tmp_path, train={"steps": 1})  # nobody looks for one


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch about its own code
def test_a_run_that_is_compiled_to_machine_code_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Half a minute of compiling; dropout is drawn by the compiled code, from the step's own seed."""
    sections = {"train": {"compile": "true"}, "probe": {"every": 1}}
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    whole = start(tmp_path / "whole", **sections)
    pieces = interrupted(tmp_path / "pieces", monkeypatch, 10, **sections)
    assert go_on(pieces) == 0
    assert records(pieces) == records(whole)
    losses = [record["loss"] for record in records(whole, "train")]
    assert losses[-1] < losses[0] - 0.5
