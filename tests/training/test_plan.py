"""What a dry run foresees is what a run then needs: memory byte by byte, parameters, FLOPs by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from configs import UserError
from configs.cli import parse
from configs.schema import Config
from data.loading import load_source
from model.layers import PRECISIONS
from model.transformer import GPT
from tests.model.spy import Spy
from training.optimizers import make_optimizers
from training.plan import ALONE_WITH_FSDP, announce, foresee, measure_memory

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 48, "context_length": 96}
V = 53


def config(precision: str = "fp32", optimizer: str = "adamw", batch_size: int = 3, **model) -> Config:
    values = {"model": SHAPE | model, "optimizer": {"name": optimizer}}
    return Config.model_validate(values | {"train": {"precision": precision, "batch_size": batch_size}})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"backend": "naive"},
        {"backend": "blocks", "context_length": 300},
        {"position": "learned", "tie_embeddings": True, "bias": True, "dropout": 0.1},
        {"n_layer": 1, "position": "learned"},
        {"n_layer": 5, "backend": "naive", "dropout": 0.1},
        {"n_layer": 6, "mlp": "swiglu", "qk_norm": True},
        {"mlp": "none", "n_kv_head": 1, "sink": "learned", "gate": True},
    ],
    ids=str,
)
def test_memory_is_what_real_tensors_take(model, precision, optimizer):
    """The spy of the attention tests counts all that real tensors hold during the second micro-step."""
    asked = config(precision, optimizer, **model)
    foreseen = measure_memory(asked, V)[1]
    gpt = GPT(asked.model, V).compute_in(PRECISIONS[precision]).train()
    tokens_BT = torch.arange(3 * asked.model.context_length).view(3, -1) % V
    optimizers = make_optimizers(gpt, asked.optimizer)

    def micro_step() -> None:
        F.cross_entropy(gpt(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()

    micro_step()
    held = [*gpt.parameters(), *gpt.buffers(), *(p.grad for p in gpt.parameters())]
    spy = Spy()
    with spy:
        kept = [tensor.detach() for tensor in held]  # so that the spy knows of them
        micro_step()
    del kept
    for one in optimizers:
        one.step()
    moments = sum(
        value.nbytes for one in optimizers for values in one.state.values() for value in values.values()
    )
    assert foreseen["weights"] + foreseen["gradients"] == sum(tensor.nbytes for tensor in held)
    assert foreseen["optimizer"] == moments
    assert foreseen["weights"] + foreseen["gradients"] + foreseen["activations"] == pytest.approx(
        spy.peak, rel=0.02
    )


def test_activations_grow_with_the_batch_and_nothing_else_does():
    small, large = (measure_memory(config(batch_size=size), V)[1] for size in (4, 8))
    assert large.pop("activations") == pytest.approx(2 * small.pop("activations"), rel=0.05)
    assert large == small


def test_a_fused_kernel_spares_the_matrix_that_the_definition_builds():
    fused, whole = (
        measure_memory(config(backend=backend, context_length=512), V)[1]["activations"]
        for backend in ("sdpa", "naive")
    )
    matrix = 4 * 3 * 2 * 512 * 512
    assert whole - fused > 2 * matrix  # the weights of both layers at least


def test_what_is_printed_is_what_follows_from_the_sizes():
    """Two layers of attention alone: 4 C C weights each; V C for the embedding and for the head."""
    argv = (
        "--data.source repeats --model.mlp none --model.norm_gain false --train.steps 7 --train.grad_accum 2"
    )
    found = "\n".join(foresee(parse(f"{argv} --model.n_layer 2".split()).config))
    C, T, symbols = 128, 64, 65
    flops = 6 * (2 * 4 * C * C + symbols * C) + 6 * 2 * C * T
    tokens = 32 * 2 * T
    assert f"{2 * 4 * C * C + 2 * symbols * C:,} parameters" in found
    assert f"{2 * 4 * C * C:,} of them without embeddings and head; vocabulary {symbols}" in found
    assert f"7 steps x {tokens:,} tokens = {7 * tokens:,}" in found
    assert (
        f"{flops:.3g} FLOPs per token, {flops * tokens:.3g} per step, {7 * flops * tokens:.3g} in all"
        in found
    )


def test_the_total_is_the_sum_of_its_parts():
    *lines, line = foresee(config(batch_size=32))
    (vocabulary,) = re.findall(r"vocabulary (\d+)", "".join(lines))
    parts = measure_memory(config(batch_size=32), int(vocabulary))[1]
    MIB = 2**20
    assert line.startswith(
        f"  memory {sum(parts.values()) / MIB:.2f} MiB: weights {parts['weights'] / MIB:.2f}"
    )


def test_what_is_small_is_told_in_mib_and_what_is_large_in_gib():
    small, large = (foresee(config(batch_size=size))[-1] for size in (1, 2**14))
    found = [re.search(r"memory ([\d.,]+) (.)iB: .* activations ([\d.,]+) ", line) for line in (small, large)]
    assert [match and match[2] for match in found] == ["M", "G"]
    assert all(0.1 < float(match[3].replace(",", "")) < 2000 for match in found if match)


def test_hundreds_of_layers_are_foreseen_as_soon_as_a_few(monkeypatch):
    """What is traced is a forward and backward pass of one layer, and of two."""
    passed, forward = [], GPT.forward

    def counting(gpt, *rest):
        passed.append(len(gpt.blocks))
        return forward(gpt, *rest)

    monkeypatch.setattr(GPT, "forward", counting)
    few, many = (measure_memory(config(n_layer=n_layer, d_model=4), V) for n_layer in (3, 300))
    assert {*passed} == {1, 2}
    assert len(many[0].blocks) == 300
    assert all(50 < many[1][name] / few[1][name] < 100 for name in ("gradients", "optimizer"))


def test_sizes_beyond_counting_are_refused_in_one_line():
    asked = config(batch_size=2**20, context_length=2**20, backend="naive")
    with pytest.raises(UserError, match="more bytes than can be counted") as caught:
        foresee(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_can_be_foreseen_and_that_writes_nothing(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(path)]
    if published := parse(words).config.model.init_from:  # where nothing is, as with whoever reads this
        with pytest.raises(UserError, match=f"model.init_from {published}: "):
            foresee(parse(words).config)
        words += ["--model.init_from", "null", "--data.tokenizer", "char"]
    assert re.search(r" [GM]iB: weights (?!0\.00)", foresee(parse(words).config)[-1])
    assert not any(tmp_path.iterdir())


LOOK = """
import sys
from configs.cli import parse
from training.plan import foresee
foresee(parse(sys.argv[1:]).config)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the most memory it took")
def test_a_model_of_124_million_parameters_is_foreseen_in_less_memory_than_it_needs():
    """Its weights and gradients alone are 0.9 GiB; importing PyTorch takes 0.35."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, "--config", "configs/gpt2_124m.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert int(done.stdout) < 600_000, done.stderr


def test_memory_of_several_ranks_is_said_to_be_of_each_and_what_fsdp_spares_not_counted():
    asked = config(n_layer=1)
    for parallel, end in {"ddp": "", "fsdp": "; with fsdp about 1/4 of all but activations"}.items():
        train = asked.train.model_copy(update={"ranks": 4, "parallel": parallel})
        line = foresee(asked.model_copy(update={"train": train}))[-1]
        assert line.endswith(f"on a CPU), on each of 4 ranks{end}")


def test_fsdp_of_one_process_is_warned_of(capsys):
    asked = parse(["--train.parallel", "fsdp", "--model.n_layer", "1"]).config
    source = load_source(asked)
    announce(asked, GPT(asked.model, source.tokenizer.vocab_size), source, 0, None, [])
    assert capsys.readouterr().err == f"warning: {ALONE_WITH_FSDP}\n"
