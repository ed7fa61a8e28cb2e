"""What a run is going to be: told at its start, and foreseen without running it (`--dry_run`)."""

import logging
import sys

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from configs import UserError
from configs.schema import WHOLE, Config
from data.corpora import load_text
from data.mixture import Mixture
from data.tokenizers import ALPHABET, vocab_size_of
from model.layers import PRECISIONS
from model.transformer import GPT
from training.devices import name_of
from training.optimizers import make_optimizers
from training.origin import find_origin

ALONE_WITH_FSDP = "train.parallel fsdp has no effect in one process: torchrun starts several"


def announce(
    config: Config, model: GPT, source: Mixture, step: int, ceiling: float | None, warnings: list[str]
) -> None:
    """Print what is about to happen, before it costs anything: going on after `step`, with these warnings."""
    first, *more = source.describe(config.train.steps)
    stands = f", going on after step {step}" if step else ""
    if step == config.train.steps:
        stands = ", already complete"
    ranks = config.train.ranks or 1
    shared = f" of {ranks} ranks ({config.train.parallel})" if ranks > 1 else ""
    speed = "" if ceiling is None else f", which multiplies matrices at {ceiling / 1e9:,.0f} GFLOP/s"
    lines = [
        config.run.dir + stands,
        f"  data   {first}; vocabulary {source.tokenizer.vocab_size:,}",
        *(f"         {line}" for line in more),
        *_model(config, model),
        f"  train  {_steps(config)}",
        f"         on {name_of(model.device)}{shared}{speed}",
    ]
    if config.model.init_from and not step:
        lines.append(f"         from the weights of {config.model.init_from}")
    if config.train.compile:
        lines.append("         by torch.compile: the first step compiles, which may take a minute")
    if config.train.precision == "fp16" and model.device.type == "cpu":
        warnings = [*warnings, "fp16 is slow on a CPU: try bf16"]
    if config.train.parallel == "fsdp" and config.train.ranks == 1:
        warnings = [*warnings, ALONE_WITH_FSDP]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(*lines, sep="\n", flush=True)


def foresee(config: Config) -> list[str]:
    """Size, FLOPs and memory of a run, from tensors without numbers; reads what the vocabulary hangs on."""
    vocab_size, step_tokens = _vocab_size(config), config.global_batch * config.model.context_length
    logging.getLogger(FakeTensorMode.__module__).disabled = True  # it would tell of an error before we do
    try:
        model, parts = measure_memory(config, vocab_size)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        ways = "make model.context_length, train.batch_size or the model smaller"
        raise UserError(f"a tensor of this run would have more bytes than can be counted: {ways}") from None
    blocks = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("blocks.", "final_")))
    flops = model.flops_per_token()
    total = sum(parts.values())
    prefix, unit = ("Gi", 2**30) if total >= 2**30 else ("Mi", 2**20)
    each = ", ".join(f"{name} {size / unit:,.2f}" for name, size in parts.items())
    shares = [flops, flops * step_tokens, flops * step_tokens * config.train.steps]
    per_token, per_step, in_all = (f"{number:.3g}" for number in shares)
    return [
        f"{config.run.dir}: a dry run, nothing is written",
        *_model(config, model),
        f"         {blocks:,} of them without embeddings and head; vocabulary {vocab_size:,}",
        f"  train  {_steps(config)}",
        f"         {per_token} FLOPs per token, {per_step} per step, {in_all} in all",
        f"  memory {total / unit:,.2f} {prefix}B: {each} {_of_what(config)}",
    ]


def measure_memory(config: Config, vocab_size: int) -> tuple[GPT, dict[str, int]]:
    """The model, of fake tensors, and what a step of training holds, in bytes by kind.

    Activations are the most that one micro-step holds at once where the gradients of another are there
    already. Evaluation and probes, which keep nothing for a backward pass, are left out. Layers are alike, so
    two models are measured, of one and of two layers: time grows faster than the depth that is measured.
    """
    with FakeTensorMode():
        model = GPT(config.model, vocab_size)
    one, two = (_measure(config, vocab_size, n_layer) for n_layer in (1, 2))
    return model, {name: one[name] + (config.model.n_layer - 1) * (two[name] - one[name]) for name in one}


def _measure(config: Config, vocab_size: int, n_layer: int) -> dict[str, int]:
    from torch.distributed._tools.mem_tracker import MemTracker  # slow, and only a dry run needs it

    with FakeTensorMode():
        shape = config.model.model_copy(update={"n_layer": n_layer})
        model = GPT(shape, vocab_size).compute_in(PRECISIONS[config.train.precision]).train()
        optimizers = make_optimizers(model, config.optimizer)
        tokens_BT = torch.zeros(config.train.batch_size, config.model.context_length, dtype=torch.long)
        segment_BT = tokens_BT if config.data.mask_documents else None

        def micro_step() -> None:
            F.cross_entropy(model(tokens_BT, None, segment_BT).flatten(0, 1), tokens_BT.flatten()).backward()

        micro_step()
        with MemTracker() as tracker:
            micro_step()
        for optimizer in optimizers:
            optimizer.step()
    peak = sum(held["Total"] for held in tracker.get_tracker_snapshot("peak").values())
    parts = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": [value for one in optimizers for kept in one.state.values() for value in kept.values()],
    }
    sizes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in parts.items()}
    return sizes | {"activations": peak - sizes["weights"] - sizes["gradients"]}


def _vocab_size(config: Config) -> int:
    if config.model.init_from:
        return find_origin(config).tokenizer.vocab_size
    if (size := vocab_size_of(config.data)) is not None:
        return size
    texts = [load_text(name, config.data.path) for name in config.data.sources if name in WHOLE]
    return len({*"".join(texts)} or {*ALPHABET}) + config.data.bos


def _model(config: Config, model: GPT) -> list[str]:
    m, backend = config.model, model.attentions()[0].backend
    shape = f"layers {m.n_layer}, heads {m.n_head}, width {m.d_model}, context {m.context_length}"
    return [
        f"  model  {shape}: {model.num_parameters():,} parameters",
        f"         attention on {backend}, linear layers in {config.train.precision}",
    ]


def _of_what(config: Config) -> str:
    ranks, measured = config.train.ranks or 1, "(of a micro-step, not compiled, on a CPU)"
    if ranks == 1:
        return measured
    spared = f"; with fsdp about 1/{ranks} of all but activations" if config.train.parallel == "fsdp" else ""
    return f"{measured}, on each of {ranks} ranks{spared}"


def _steps(config: Config) -> str:
    steps, tokens = config.train.steps, config.global_batch * config.model.context_length
    return f"{steps:,} step{'s' * (steps > 1)} x {tokens:,} tokens = {steps * tokens:,}"
