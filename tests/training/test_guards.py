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
from torch import Tensor

from configs.schema import Model
from model.transformer import GPT
from training import Stopped
from training.checkpoints import State
from training.guards import enough_memory, first_nonfinite, interruptible

ROOT = Path(__file__).parents[2]
BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


@pytest.fixture
def gpt() -> GPT:
    return GPT(Model(n_layer=3, n_head=2, d_model=8, context_length=17), 11)


def loss_of(gpt: GPT) -> Tensor:
    tokens_BT = torch.arange(34).view(2, 17) % 11
    return F.cross_entropy(gpt(tokens_BT).flatten(0, 1), tokens_BT.flatten())


def name_of(gpt: GPT) -> str:
    return first_nonfinite(gpt, lambda: loss_of(gpt))


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
        ("blocks.0.attention.heads", "layer 0, attention.heads"),
        ("blocks.1.mlp.W_in", "layer 1, mlp.W_in"),
        ("blocks.2", "layer 2"),
        ("final_norm", "final_norm"),
    ],
)
def test_an_output_is_named_where_it_first_appears(gpt, module, name, bad):
    gpt.get_submodule(module).register_forward_hook(lambda module, inputs, output: spoil(output, bad))
    assert name_of(gpt) == f"output of {name}"


@BAD
def test_a_gradient_is_named_with_its_layer(gpt, bad):
    loss_of(gpt).backward()
    weight = gpt.get_parameter("blocks.1.attention.W_v.weight")
    weight.grad = spoil(weight.grad, bad)
    assert name_of(gpt).startswith("gradient of layer 1, attention.W_v")


def test_a_loss_that_breaks_by_itself_is_told_from_a_layer(gpt):
    assert first_nonfinite(gpt, lambda: loss_of(gpt) * math.inf).startswith("the loss")


def test_finite_gradients_whose_norm_is_not_are_told_apart(gpt):
    loss_of(gpt).backward()
    for parameter in gpt.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    assert name_of(gpt).startswith("the norm of the gradient")


def test_looking_leaves_no_hook_even_after_an_error(gpt):
    name_of(gpt)
    with pytest.raises(ZeroDivisionError):
        first_nonfinite(gpt, lambda: 1 / 0)
    assert not any(module._forward_hooks for module in gpt.modules())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before


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
