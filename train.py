"""Train a small GPT and record what its attention heads do: config -> data -> model -> loop."""

import sys

from configs.cli import Request, parse_or_exit, to_yaml

if __name__ == "__main__":  # ahead of the slow imports, so that --help and config errors come at once
    REQUEST = parse_or_exit(sys.argv[1:])

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.probes import Probes, make_probes, measure, summary
from configs import UserError
from configs.schema import Config
from configs.seeds import seed_for
from data import Source, load_source
from model.transformer import GPT
from training import Stopped, checkpoints
from training.evaluation import evaluate
from training.guards import first_nonfinite, interruptible
from training.loggers import JsonLines
from training.optimizers import make_optimizers
from training.schedules import rate_share


@dataclass
class Run:
    """Everything that the loop works on."""

    config: Config
    folder: Path
    source: Source
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    probes: Probes | None
    state: checkpoints.State


def main(request: Request) -> int:
    """Serve one request; returns the exit code: 0 done, 1 stopped, 2 the request was wrong, 130 interrupted."""
    try:
        run = build(request)
        resume(run) if request.resume else start(run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    describe(run)
    log = JsonLines(run.folder / "metrics.jsonl", run.state.step if request.resume else None)
    try:
        with interruptible() as interrupted:
            finished = loop(run, log, interrupted)
    except Stopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()
    print(f"{'done' if finished else f'interrupted; go on with --resume {run.folder}'}: {run.folder}")
    return 0 if finished else 130


def build(request: Request) -> Run:
    """Make everything, check everything, write nothing to the run folder."""
    config, T = request.config, request.config.model.context_length
    folder = Path(config.run.dir)
    if not request.resume:
        check_unused(folder, config.run.overwrite)
    source = load_source(config)
    model = GPT(
        config.model,
        source.tokenizer.vocab_size,
        torch.Generator().manual_seed(seed_for(config.run.seed, "init")),
    )
    model.compute_in(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
    probes = make_probes(source, T, config.probe.sequences, config.run.seed) if config.probe.every else None
    state = checkpoints.State(fingerprint=source.fingerprint)
    return Run(config, folder, source, model, make_optimizers(model, config.optimizer), probes, state)


def check_unused(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something; a run may be overwritten, anything else never."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir {folder} is a file; choose another --run.dir")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "config.yaml").exists():
        raise UserError(f"run.dir {folder} is not empty and not a run; choose another --run.dir")
    if not overwrite:
        raise UserError(
            f"run.dir {folder} holds a run: continue it with --resume {folder}, choose another --run.dir, or start "
            "afresh with --run.overwrite true"
        )


def start(run: Run) -> None:
    """Make the run folder; config and tokenizer come first, so that it is a run from then on."""
    try:
        if run.folder.exists():
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True)
        (run.folder / "config.yaml").write_text(to_yaml(run.config))
        (run.folder / "tokenizer.json").write_text(json.dumps(run.source.tokenizer.to_json()))
    except OSError as error:
        raise UserError(f"cannot write to run.dir {run.folder}: {error.strerror}") from None


def resume(run: Run) -> None:
    """Load the newest intact checkpoint, and say what differs from when it was written."""
    state, faults = checkpoints.load_newest(run.folder / "checkpoints", run.model, run.optimizers)
    if state.fingerprint != run.source.fingerprint:
        raise UserError(
            f"the data differ from those that {run.folder} was trained on; restore them or start a new run"
        )
    if run.config.train.steps < state.step:
        raise UserError(
            f"train.steps {run.config.train.steps} lies before step {state.step}, which is reached already"
        )
    now = run.state.environment
    changed = [
        f"{key} was {was}, is {now.get(key)}" for key, was in state.environment.items() if was != now.get(key)
    ]
    if changed:
        faults.append(f"the run will not continue bit for bit: {', '.join(changed)}")
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)
    state.environment = now
    run.state = state
    checkpoints.sweep(run.folder / "checkpoints")
    (run.folder / "config.yaml").write_text(to_yaml(run.config))


def describe(run: Run) -> None:
    """What is about to happen, before it costs anything."""
    c, m = run.config, run.config.model
    tokens = c.global_batch * m.context_length
    print(f"{run.folder}" + (f", resumed after step {run.state.step}" if run.state.step else ""))
    print(f"  data   {c.data.source}: {run.source.description}; vocabulary {run.source.tokenizer.vocab_size}")
    print(
        f"  model  {m.n_layer} layers x {m.n_head} heads, width {m.d_model}, context {m.context_length}: "
        f"{run.model.num_parameters():,} parameters; attention on {run.model.attentions()[0].backend}, "
        f"linear layers in {c.train.precision}"
    )
    print(
        f"  train  {c.train.steps:,} steps x {tokens:,} tokens = {c.train.steps * tokens:,} tokens",
        flush=True,
    )


def loop(run: Run, log: JsonLines, interrupted: Callable[[], bool]) -> bool:
    """Train from `run.state` to the last step; False where a signal came first, after saving a checkpoint."""
    c, state = run.config, run.state
    step_tokens = c.global_batch * c.model.context_length
    began = time.perf_counter() - state.seconds
    tokens, seconds = 0, 0.0  # since the last train record, updates alone
    run.model.train()
    pause = 0.2 if sys.stderr.isatty() else 10
    with tqdm(total=c.train.steps, initial=state.step, unit="step", mininterval=pause) as bar:
        if state.step == 0:
            look(run, log, bar, save=True)
        while state.step < c.train.steps and not interrupted():
            started = time.perf_counter()
            share = rate_share(state.step + 1, c.train.steps, c.optimizer)
            loss, grad_norm = update(run, state.step + 1, share)
            state.step += 1
            state.tokens += step_tokens
            tokens, seconds = tokens + step_tokens, seconds + time.perf_counter() - started
            if due(c.log.every, state.step, c.train.steps):
                rate = round(tokens / seconds)
                record = {"loss": loss, "lr": share * c.optimizer.lr, "grad_norm": grad_norm}
                log.write("train", state.step, **record, tokens=state.tokens, tokens_per_s=rate)
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,} tokens/s", refresh=False)
                tokens, seconds = 0, 0.0
            bar.update()
            state.seconds = time.perf_counter() - began
            look(run, log, bar, save=interrupted())
    if state.step < c.train.steps:
        return False
    state.seconds = max(state.seconds, time.perf_counter() - began)
    log.write(
        "end", state.step, seconds=state.seconds, telemetry_share=state.telemetry_seconds / state.seconds
    )
    return True


def update(run: Run, step: int, share: float) -> tuple[float, float]:
    """One optimizer step at `share` of the peak rates; returns loss and gradient norm, both finite, else `Stopped`."""
    c, model = run.config, run.model
    inputs_BT, targets_BT = run.source.batch(step)

    def losses() -> Iterator[Tensor]:
        torch.manual_seed(
            seed_for(c.run.seed, "dropout", step)
        )  # dropout alone draws from the global generator
        for x_BT, y_BT in zip(
            *(part.split(c.train.batch_size) for part in (inputs_BT, targets_BT)), strict=True
        ):
            yield F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten()) / c.train.grad_accum

    loss = 0.0
    for micro in losses():
        micro.backward()
        loss += micro.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.train.clip or math.inf).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        stop(run, step, first_nonfinite(model, lambda: torch.stack(list(losses()))))
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss, grad_norm


def look(run: Run, log: JsonLines, bar: tqdm, save: bool) -> None:
    """Evaluate, probe and save where this step asks for it. None of it touches what the next update will do."""
    c, state, last = run.config, run.state, run.config.train.steps
    evaluates, probes = due(c.eval.every, state.step, last), due(c.probe.every, state.step, last)
    save = save or due(c.checkpoint.every, state.step, last) or state.step == last
    save = save or (c.checkpoint.log_spaced and checkpoints.is_log_spaced(state.step))
    if evaluates or probes or save:
        broken = [name for name, parameter in run.model.named_parameters() if not parameter.isfinite().all()]
        if broken:
            stop(run, state.step, f"parameter {broken[0]}")
    state.eval_loss = None
    if evaluates:
        batches = run.source.validation(c.train.batch_size, c.eval.tokens)
        result = evaluate(run.model, batches, run.source.bytes_per_token)
        state.eval_loss = result["loss"]
        log.write("eval", state.step, **result)
        bar.write(f"step {state.step:>6}  validation loss {result['loss']:.4f}")
        if state.best_loss is None or state.eval_loss < state.best_loss:
            state.best_loss = state.eval_loss
            save = save or c.checkpoint.keep_best
    if probes and run.probes is not None:
        started = time.perf_counter()
        record = measure(run.model, run.probes, bos_trained=c.data.bos)
        log.write("attention", state.step, **record, seconds=time.perf_counter() - started)
        bar.write(f"step {state.step:>6}  {summary(record)}")
        state.telemetry_seconds += time.perf_counter() - started
    if save:
        checkpoints.save(run.folder / "checkpoints", run.model, run.optimizers, state)
        checkpoints.prune(run.folder / "checkpoints", c.checkpoint)


def due(every: int, step: int, last: int) -> bool:
    """Every `every` steps, the first and the last included; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == last)


def stop(run: Run, step: int, culprit: str) -> NoReturn:
    """End the run before numbers that are not finite reach the weights or a checkpoint."""
    steps = checkpoints.steps_in(run.folder / "checkpoints")
    kept = checkpoints.path_of(run.folder / "checkpoints", steps[-1]) if steps else "none yet"
    raise Stopped(f"step {step}: first tensor that is not finite: {culprit}; last good checkpoint: {kept}")


if __name__ == "__main__":
    sys.exit(main(REQUEST))
