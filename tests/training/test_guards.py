"""The first number that is not finite is named; a signal is noted and handed back."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model
from model.transformer import GPT
from training import Stopped
from training.checkpoints import State
from training.guards import enough_memory, first_nonfinite, interruptible, place

ROOT = Path(__file__).parents[2]
BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


@pytest.fixture
def gpt() -> GPT:
    return GPT(Model(n_layer=3, n_head=2, d_model=8, context_length=17), 11)


def loss_of(gpt: GPT) -> Tensor:
    tokens_BT = torch.arange(34).view(2, 17) % 11
    return F.cross_entropy(gpt(tokens_BT).flatten(0, 1), tokens_BT.flatten())


def name_of(gpt: GPT, micro_steps: int = 1, loss: float = 0.0) -> str:
    return first_nonfinite(gpt, (loss_of(gpt) for _ in range(micro_steps)), loss)


def spoil(value: Tensor, bad: float) -> Tensor:
    spoilt = value.clone()
    spoilt.view(-1)[3] = bad
    return spoilt


@BAD
@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        ("token_embedding.weight", "token_embedding"),
        ("blocks.1.attention.W_q.weight", "layer 1, attention.W_q"),
        ("blocks.2.mlp.W_out.weight", "layer 2, mlp.W_out"),
        ("head.weight", "head"),
    ],
)
def test_a_parameter_is_named_with_its_layer(gpt, parameter, name, bad):
    weight = gpt.get_parameter(parameter)
    weight.data = spoil(weight.data, bad)
    assert name_of(gpt).startswith(f"parameter {name}")


@BAD
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("token_embedding", "token_embedding"),
        ("blocks.0.attention.heads", "layer 0, attention.heads, head 0"),
        ("blocks.1.mlp.W_in", "layer 1, mlp.W_in"),
        ("blocks.2", "layer 2"),
        ("final_norm", "final_norm"),
    ],
)
def test_an_output_is_named_where_it_first_appears(gpt, module, name, bad):
    gpt.get_submodule(module).register_forward_hook(lambda module, inputs, output: spoil(output, bad))
    assert name_of(gpt) == f"output of {name} in micro-step 1"
    with gpt.reading():
        assert name_of(gpt) == f"output of {name}"


def spoil_in_turn(gpt: GPT, place: str, turn: int) -> None:
    calls = []

    def hook(module, inputs, output):
        calls.append(1)
        return spoil(output, math.nan) if len(calls) == turn else output

    gpt.get_submodule(place).register_forward_hook(hook)


@pytest.mark.parametrize("turn", [1, 3])
def test_the_micro_step_is_told(gpt, turn):
    spoil_in_turn(gpt, "blocks.1.mlp", turn)
    assert name_of(gpt, micro_steps=3) == f"output of layer 1, mlp in micro-step {turn}"


@pytest.mark.parametrize(
    ("output", "parameter", "first"),
    [
        ("blocks.0.mlp", "blocks.1.attention.W_q.weight", "output of layer 0, mlp in micro-step 1"),
        ("blocks.1.mlp", "blocks.1.attention.W_q.weight", "parameter layer 1, attention.W_q.weight, head 0"),
        ("blocks.1.mlp.W_in", "blocks.1.mlp.W_out.weight", "output of layer 1, mlp.W_in in micro-step 1"),
        ("token_embedding", "head.weight", "output of token_embedding in micro-step 1"),
        ("blocks.2.mlp.W_in", "blocks.2.mlp.W_in.weight", "parameter layer 2, mlp.W_in.weight"),
    ],
)
def test_of_an_output_and_a_parameter_that_which_comes_first_is_named(gpt, output, parameter, first):
    gpt.get_submodule(output).register_forward_hook(lambda module, inputs, out: spoil(out, math.nan))
    weight = gpt.get_parameter(parameter)
    weight.data = spoil(weight.data, math.nan)
    assert name_of(gpt) == first


def test_parameters_that_no_module_of_their_own_uses_are_named(gpt):
    """Learned positions are read without a call, and a sink is a parameter of the attention itself."""
    shape = {"n_layer": 2, "n_head": 2, "d_model": 8, "context_length": 17}
    for options, name in (
        ({"position": "learned"}, "position_embedding.weight"),
        ({"sink": "learned"}, "layer 1, attention.sink_H"),
    ):
        model = GPT(Model(**shape, **options), 11)
        parameter = {place(key): p for key, p in model.named_parameters()}[name]
        parameter.data = torch.full_like(parameter, math.nan)
        assert name_of(model) == f"parameter {name}"


GROUPED = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 16, "bias": True, "context_length": 17}


@BAD
@pytest.mark.parametrize(
    ("parameter", "index", "head"),
    [  # heads are 4 wide; queries have four, keys and values two
        ("W_q.weight", (9, 0), "head 2"),
        ("W_q.bias", (15,), "head 3"),
        ("W_k.weight", (4, 15), "key head 1"),
        ("W_v.weight", (3, 15), "value head 0"),
        ("W_v.bias", (7,), "value head 1"),
        ("W_o.weight", (0, 11), "head 2"),
        ("W_gate.weight", (3, 0), "head 3"),
        ("sink_H", (1,), "head 1"),
    ],
)
def test_the_head_that_a_bad_number_is_part_of_is_named(parameter, index, head, bad):
    gpt = GPT(Model(**GROUPED, sink="learned", gate=True), 11)
    gpt.get_parameter(f"blocks.1.attention.{parameter}").data[index] = bad
    assert name_of(gpt) == f"parameter layer 1, attention.{parameter}, {head}"


@pytest.mark.parametrize(
    ("module", "feature", "told"),
    [("heads", 7, ", head 1"), ("W_k", 7, ", key head 1"), ("W_gate", 2, ", head 2"), ("W_o", 7, "")],
)
def test_the_head_of_an_output_is_named_where_it_has_heads_side_by_side(module, feature, told):
    gpt = GPT(Model(**GROUPED, gate=True), 11)
    mark = torch.zeros(8 if module == "W_k" else 4 if module == "W_gate" else 16)
    mark[feature] = math.nan
    gpt.blocks[1].attention.get_submodule(module).register_forward_hook(
        lambda module, inputs, out: out + mark
    )
    assert name_of(gpt) == f"output of layer 1, attention.{module}{told} in micro-step 1"


@pytest.mark.parametrize(("rows", "told"), [([0, 9], ", heads 0, 2"), ([0, 4, 8, 12], "")])
def test_several_heads_are_named_and_all_of_them_are_no_head_in_particular(rows, told):
    gpt = GPT(Model(**GROUPED), 11)
    gpt.blocks[0].attention.W_q.weight.data[rows] = math.nan
    assert name_of(gpt) == f"parameter layer 0, attention.W_q.weight{told}"


class Twice(nn.Module):
    """Somebody's own layer, which returns more than a tensor and keeps a list of parameters."""

    def __init__(self, bad: bool):
        super().__init__()
        self.factors, self.bad = nn.ParameterList([torch.ones(8), torch.ones(8)]), bad

    def forward(self, x, *rest):
        return x * self.factors[0], {"rest": None}, x * self.factors[1] / (0.0 if self.bad else 1.0)


class Wrapped(nn.Module):
    def __init__(self, bad: bool):
        super().__init__()
        self.twice = Twice(bad)

    def forward(self, x, *rest):
        return self.twice(x)[0] + self.twice(x)[2]


def test_a_module_of_ones_own_is_named_too(gpt):
    gpt.blocks[1] = Wrapped(bad=True)
    assert name_of(gpt) == "output of layer 1, twice in micro-step 1"
    gpt.blocks[1] = Wrapped(bad=False)
    assert name_of(gpt) == "the norm of the gradient"
    gpt.blocks[1].twice.factors[1].data[3] = math.nan
    assert name_of(gpt) == "parameter layer 1, twice.factors.1"


def test_an_attention_of_ones_own_is_named_without_its_heads(gpt):
    gpt.blocks[1].attention = nn.Module()
    gpt.blocks[1].attention.W_q = nn.Linear(8, 8)
    gpt.blocks[1].attention.forward = lambda x, *rest: gpt.blocks[1].attention.W_q(x) * math.nan
    gpt.blocks[1].attention.W_q.weight.data[3] = math.nan
    assert name_of(gpt) == "parameter layer 1, attention.W_q.weight"


@BAD
def test_a_gradient_is_named_with_its_layer(gpt, bad):
    loss_of(gpt).backward()
    weight = gpt.get_parameter("blocks.1.attention.W_v.weight")
    weight.grad = spoil(weight.grad, bad)
    assert name_of(gpt) == "gradient of layer 1, attention.W_v.weight, value head 0 in the backward pass"


def test_gradients_are_counted_because_the_backward_pass_spreads_what_is_bad(gpt):
    gpt.blocks[1].mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.nan,))
    loss_of(gpt).backward()
    below = 1 + 8 + 6  # the embedding, layer 0, what layer 1 has ahead of its MLP
    first, last = "gradient of token_embedding.weight in the backward pass", "layer 1, mlp_norm.weight"
    assert name_of(gpt) == f"{first} ({below} are, up to that of {last})"


def test_a_loss_that_breaks_by_itself_is_told_from_a_layer(gpt):
    losses = (loss_of(gpt) * factor for factor in (1.0, math.inf))
    assert first_nonfinite(gpt, losses, math.inf) == "the loss in micro-step 2"


def test_a_loss_that_is_finite_when_repeated_blames_no_gradient(gpt):
    assert name_of(gpt, loss=math.nan).startswith("the loss, though it is finite when the step is repeated")


def test_finite_gradients_whose_norm_is_not_are_told_apart(gpt):
    loss_of(gpt).backward()
    for parameter in gpt.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    assert name_of(gpt).startswith("the norm of the gradient")


def test_looking_leaves_no_hook_even_after_an_error(gpt):
    def failing():
        yield loss_of(gpt)
        raise ZeroDivisionError

    name_of(gpt)
    with pytest.raises(ZeroDivisionError):
        first_nonfinite(gpt, failing(), 0.0)
    assert not any(module._forward_hooks for module in gpt.modules())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before


@pytest.mark.parametrize(("processes", "left"), [(1, signal.SIG_DFL), (2, signal.SIG_IGN)])
def test_what_one_of_several_processes_has_to_tell_is_not_cut_off_by_torchrun(processes, left, monkeypatch):
    """It sends a signal to all that are left when one has gone."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError), interruptible():
            raise RuntimeError
        assert signal.getsignal(signal.SIGTERM) == left
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once_and_without_a_traceback(number):
    code = (
        "import os\nfrom training.guards import interruptible\nwith interruptible() as interrupted:\n"
        f"    os.kill(os.getpid(), {int(number)})\n    print(interrupted(), flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n    print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-number, "True\n")
    assert done.stderr.strip() == "ending after this step, with a checkpoint; a second signal ends at once"


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (1, 0)])
def test_of_several_processes_the_first_tells_of_a_signal(rank, told, monkeypatch, capfd):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": 2, "RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted()
    assert capfd.readouterr().err.count("ending after this step") == told


def ask_the_cpu_for_a_pebibyte() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def ask_numpy_for_a_pebibyte() -> None:
    np.empty(2**50, np.uint8)


def ask_a_gpu_that_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")


@pytest.mark.parametrize(
    "ask", [ask_the_cpu_for_a_pebibyte, ask_numpy_for_a_pebibyte, ask_a_gpu_that_is_full]
)
def test_no_memory_is_told_in_one_line_with_ways_out(ask):
    with pytest.raises(Stopped) as caught, enough_memory(State(step=7)):
        ask()
    message = str(caught.value)
    assert message.startswith("after step 7: out of memory: ")
    assert message.endswith("; try a smaller train.batch_size; --dry_run tells what a run needs")
    assert "\n" not in message


OTHERS = [RuntimeError("mat1 and mat2 shapes"), ValueError("out of memory"), Stopped("disk full")]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, enough_memory(State()):
        raise error
    assert caught.value is error


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) == before
