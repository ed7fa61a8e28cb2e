"""Train a small GPT and record what its attention heads do: config -> data -> model -> loop."""

import signal
import sys

from configs.cli import Request, parse_or_exit, to_yaml

if __name__ == "__main__":  # ahead of the slow imports, so that --help and config errors come at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while there is nothing to save
    REQUEST = parse_or_exit(sys.argv[1:])

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis import report
from analysis.heads import describe_heads, in_words
from analysis.probes import Probes, make_probes, measure, summary
from analysis.view import view
from configs import UserError
from configs.schema import Config
from configs.seeds import seed_for
from data.loading import load_source
from data.mixture import Mixture
from model.layers import PRECISIONS
from model.transformer import GPT
from training import Stopped, checkpoints
from training.evaluation import evaluate
from training.folder import create, has_begun, refuse_used
from training.guards import first_nonfinite, interruptible, nonfinite_parameters
from training.loggers import read_records, replace_text
from training.mirror import MirroredLog
from training.optimizers import make_optimizers
from training.schedules import due, rate_share


@dataclass
class Run:
    """Everything that the loop works on."""

    config: Config
    folder: Path
    source: Mixture
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    probes: Probes | None
    state: checkpoints.State
    began: float = 0.0  # when the loop would have begun, had nothing interrupted it


def main(request: Request) -> int:
    """Serve one request; returns the exit code: 0 done, 1 stopped, 2 request wrong, 130 interrupted."""
    try:
        run = build(request)
        fresh = not request.resume or not has_begun(run.folder)
        if not request.resume:
            create(run.folder, to_yaml(run.config), json.dumps(run.source.tokenizer.to_json()))
        elif not fresh:
            resume(run)
        replace_text(run.folder / "config.yaml", to_yaml(run.config))
        describe(run)
        log = MirroredLog(run.folder, -1 if fresh else run.state.step, run.config, run.state.wandb_id)
        with log:
            with interruptible() as interrupted:
                loop(run, log, interrupted, fresh)
            if finished := run.state.step == run.config.train.steps:
                conclude(run, log)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, OSError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    if finished:
        print(f"{run.folder} is complete: open {run.folder / 'report.html'}")
        return 0
    print(f"interrupted; go on with --resume {run.folder}")
    return 130


def build(request: Request) -> Run:
    """Make everything and check everything; the run folder is not touched."""
    config, folder = request.config, Path(request.config.run.dir)
    if not request.resume:
        refuse_used(folder, config.run.overwrite)
    source, seed, T = load_source(config), config.run.seed, config.model.context_length
    generator = torch.Generator().manual_seed(seed_for(seed, "init"))
    try:
        model = GPT(config.model, source.tokenizer.vocab_size, generator)
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"the model does not fit in memory: {str(error).splitlines()[0]}") from None
    model.compute_in(PRECISIONS[config.train.precision])
    optimizers = make_optimizers(model, config.optimizer)
    probes = make_probes(source, T, config.probe.sequences, seed) if config.probe.every else None
    state = checkpoints.State(fingerprint=source.fingerprint)
    # Overwriting is meant once: who repeats this run from its config.yaml must not lose another.
    config = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})
    return Run(config, folder, source, model, optimizers, probes, state)


def resume(run: Run) -> None:
    """Load the newest intact checkpoint, and say what differs from when it was written."""
    run.state, faults = checkpoints.load_newest(run.folder / "checkpoints", run.model, run.optimizers)
    if run.state.fingerprint != run.source.fingerprint:
        raise UserError(f"the data differ from those that {run.folder} was trained on; start a new run")
    if run.state.step > run.config.train.steps:
        raise UserError(f"train.steps {run.config.train.steps} is fewer than the {run.state.step} done")
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)


def describe(run: Run) -> None:
    """What is about to happen, before it costs anything."""
    c, m, tokens = run.config, run.config.model, run.config.global_batch * run.config.model.context_length
    shape = f"{m.n_layer} layers x {m.n_head} heads, width {m.d_model}, context {m.context_length}"
    print(f"{run.folder}" + (f", going on after step {run.state.step}" if run.state.step else ""))
    data = run.source.describe(c.train.steps)
    print(
        "\n         ".join([f"  data   {data[0]}; vocabulary {run.source.tokenizer.vocab_size}", *data[1:]])
    )
    print(f"  model  {shape}: {run.model.num_parameters():,} parameters")
    print(f"         attention on {run.model.attentions()[0].backend}, linear layers in {c.train.precision}")
    print(f"  train  {c.train.steps:,} steps x {tokens:,} tokens = {c.train.steps * tokens:,}", flush=True)


def loop(run: Run, log: MirroredLog, interrupted: Callable[[], bool], fresh: bool) -> None:
    """Train from `run.state` to the last step, or to a signal; both end with a checkpoint."""
    c, state = run.config, run.state
    step_tokens = c.global_batch * c.model.context_length
    run.began = time.perf_counter() - state.seconds
    tokens, seconds = 0, 0.0  # since the last train record, updates alone
    run.model.train()
    line = "{n_fmt}/{total_fmt} steps, {elapsed} gone, {remaining} to go{postfix}\n"  # in a log file
    looks: dict[str, Any] = {} if sys.stderr.isatty() else {"bar_format": line, "mininterval": 10}
    with tqdm(total=c.train.steps, initial=state.step, unit="step", **looks) as bar:
        say = bar.write if sys.stderr.isatty() else partial(print, flush=True)
        stopping = look(run, log, say, interrupted) if fresh else interrupted()
        while state.step < c.train.steps and not stopping:
            started = time.perf_counter()
            share = rate_share(state.step + 1, c.train.steps, c.optimizer)
            loss, grad_norm = update(run, state.step + 1, share)
            state.step, state.tokens = state.step + 1, state.tokens + step_tokens
            tokens, seconds = tokens + step_tokens, seconds + time.perf_counter() - started
            if due(c.log.every, state.step, c.train.steps):
                rate, record = round(tokens / seconds), {"loss": loss, "lr": share * c.optimizer.lr}
                record |= {"grad_norm": grad_norm, "tokens": state.tokens, "tokens_per_s": rate}
                log.write("train", state.step, **record)
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,} tokens/s", refresh=False)
                tokens, seconds = 0, 0.0
            bar.update()
            stopping = look(run, log, say, interrupted)
    if state.step == c.train.steps:
        state.seconds = time.perf_counter() - run.began
        telemetry_share = state.telemetry_seconds / state.seconds
        log.write("end", state.step, seconds=state.seconds, telemetry_share=telemetry_share)


def update(run: Run, step: int, share: float) -> tuple[float, float]:
    """One optimizer step at `share` of the peak rates; loss and gradient norm, or `Stopped`."""
    c, model, batch = run.config, run.model, run.source.batch(step)

    def losses() -> Iterator[Tensor]:
        torch.manual_seed(seed_for(c.run.seed, "dropout", step))  # dropout alone uses the global generator
        for x_BT, y_BT in zip(*(part.split(c.train.batch_size) for part in batch), strict=True):
            yield F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten()) / c.train.grad_accum

    loss = 0.0
    for micro in losses():
        micro.backward()
        loss += micro.item()
    grad_norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    if not math.isfinite(loss + grad_norm.item()):
        stop(run, step, first_nonfinite(model, lambda: torch.stack(list(losses()))))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), c.train.clip or math.inf, grad_norm)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss, grad_norm.item()


def look(run: Run, log: MirroredLog, say: Callable[[str], None], interrupted: Callable[[], bool]) -> bool:
    """Evaluate, probe and save where due, unnoticed by the next update; True if a signal came: saved then."""
    c, state, last, folder = run.config, run.state, run.config.train.steps, run.folder / "checkpoints"
    save = state.step in (0, last) or due(c.checkpoint.every, state.step, last)
    save = save or (c.checkpoint.log_spaced and checkpoints.is_log_spaced(state.step))
    evaluates, probes = due(c.eval.every, state.step, last), due(c.probe.every, state.step, last)
    if (save or evaluates or probes) and (broken := nonfinite_parameters(run.model)):
        stop(run, state.step, broken[0])
    if evaluates:
        batches = run.source.validation(c.train.batch_size, c.eval.tokens)
        result = evaluate(run.model, batches, run.source.bytes_per_token)
        if not math.isfinite(result["loss"]):
            stop(run, state.step, "the validation loss")
        log.write("eval", state.step, **result)
        say(f"step {state.step:>6}  validation loss {result['loss']:.4f}")
        if state.best is None or result["loss"] < state.best[0]:
            state.best = result["loss"], state.step
            save = save or c.checkpoint.keep_best
    if probes and run.probes is not None:
        started = time.perf_counter()
        record = measure(run.model, run.probes, bos_trained=c.data.bos)
        log.write("attention", state.step, **record, seconds=time.perf_counter() - started)
        say(f"step {state.step:>6}  {summary(record)}")
        state.telemetry_seconds += time.perf_counter() - started
    log.flush()
    stopping = interrupted()
    if save or stopping:
        if broken := nonfinite_parameters(run.model):
            stop(run, state.step, broken[0])
        state.seconds = time.perf_counter() - run.began
        checkpoints.save(folder, run.model, run.optimizers, state)
        checkpoints.prune(folder, c.checkpoint, state.best[1] if state.best else None)
    return stopping


def conclude(run: Run, log: MirroredLog) -> None:
    """`heads.json` and `report.html`: what the run has come to."""
    c, heads = run.config, None
    if run.probes is not None:
        about = {"run": run.folder.name, "step": run.state.step}
        heads = describe_heads(run.model, run.probes, c.data.bos, c.run.seed, about)
        replace_text(run.folder / "heads.json", json.dumps(heads, allow_nan=False))
        log.heads(heads)
        print(in_words(heads))
    records = read_records(run.folder / "metrics.jsonl")
    shown = view(run.folder.name, c, records, heads, run.model, run.source.tokenizer)
    replace_text(run.folder / "report.html", report.page([shown]))


def stop(run: Run, step: int, culprit: str) -> NoReturn:
    """End the run before a number that is not finite reaches the weights or a checkpoint."""
    folder = run.folder / "checkpoints"
    good = next((checkpoints.path_of(folder, s) for s in reversed(checkpoints.steps_in(folder))), "none yet")
    raise Stopped(f"step {step}: the first tensor that is not finite is {culprit}; last good: {good}")


if __name__ == "__main__":
    sys.exit(main(REQUEST))
