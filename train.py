"""Train a small GPT and record what its attention heads do: config -> data -> model -> loop."""

import signal
import sys

from configs.cli import Request, parse_or_exit, to_yaml

if __name__ == "__main__":  # ahead of the slow imports, so that --help and config errors come at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while there is nothing to save
    REQUEST = parse_or_exit(sys.argv[1:])

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analysis.alarms import alarms
from analysis.conclusion import conclude
from analysis.probes import Probes, make_probes, measure, summary
from configs import UserError
from configs.files import replace_text
from configs.ranks import ALONE, Ranks
from configs.schema import Config
from configs.seeds import seed_for
from data.loading import load_source
from data.mixture import Mixture
from data.tokenizers import load_tokenizer
from model.layers import PRECISIONS
from model.transformer import GPT
from training import Stopped, checkpoints, distributed, plan
from training.devices import choose_device, to_device
from training.evaluation import evaluate
from training.failed import keep, stop, stop_evaluating
from training.folder import create, has_begun, owned
from training.guards import enough_memory, first_nonfinite, interruptible, nonfinite_parameters
from training.loggers import JsonLines, progress
from training.mirror import MirroredLog
from training.optimizers import make_optimizers
from training.origin import find_origin
from training.schedules import due, rate_share
from training.step import micro_losses, unscale
from training.throughput import Meter, ceiling


@dataclass
class Run:
    """Everything that the loop works on."""

    config: Config
    folder: Path
    source: Mixture
    ranks: Ranks
    model: GPT  # that is read
    trained: GPT  # that is updated: the same, or by fsdp a part of it
    forward: Callable[..., torch.Tensor]  # of the updates
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # of the loss in fp16; otherwise it passes through
    meter: Meter
    probes: Probes | None
    state: checkpoints.State
    fresh: bool  # whether there is no checkpoint to go on from
    warnings: list[str]
    began: float = 0.0  # when the loop would have begun, had nothing interrupted it


def main(request: Request) -> int:
    """Serve one request; returns the exit code: 0 done, 1 stopped, 2 request wrong, 130 interrupted."""
    try:
        with distributed.joined(request.config.run.device) as ranks:
            if request.dry_run:
                print(*plan.foresee(request.config), sep="\n")
                return 0
            folder, overwrite = Path(request.config.run.dir), request.config.run.overwrite
            with owned(folder, None if request.resume else overwrite) if ranks.rank == 0 else nullcontext():
                finished = serve(request, ranks)
            complete = f"{folder} is complete: open {folder / 'report.html'}"
            print(complete if finished else f"interrupted; go on with --resume {folder}")
            return 0 if finished else 130
    except (UserError, Stopped, OSError) as error:
        return distributed.fail(error)


def serve(request: Request, ranks: Ranks) -> bool:
    """Build, train and conclude; False if a signal came before all was done. The first rank alone writes."""
    run, first = build(request, ranks), ranks.rank == 0
    ranks.add(torch.zeros(1))  # wait until all have looked at the folder
    if first and run.fresh:
        create(run.folder, run.config, run.source.tokenizer)
    if not run.fresh:
        resume(run)
    if first:
        if not run.fresh:
            replace_text(run.folder / "config.yaml", to_yaml(run.config))
        plan.announce(run.config, run.trained, run.source, run.state.step, run.meter.ceiling, run.warnings)
        known = -1 if run.fresh else run.state.step
        log: JsonLines = MirroredLog(run.folder, known, run.config, run.state.wandb_id)
    else:
        log = JsonLines(Path(os.devnull))
    with suppress(KeyboardInterrupt), log, enough_memory(run.state):
        with interruptible() as here:
            loop(run, log, interrupted := distributed.anywhere(ranks, here))
            if run.state.step < run.config.train.steps or interrupted():
                return False
        with distributed.whole(run.model, run.trained), interruptible(saved=True):
            if first:
                parts = run.model, run.probes, run.source.tokenizer
                log.heads(conclude(run.folder, run.config, run.state.step, log.records(), *parts))
        return True
    return False


def build(request: Request, ranks: Ranks = ALONE) -> Run:
    """Make everything and check everything; the run folder is not touched."""
    config, folder = request.config, Path(request.config.run.dir)
    device, dtype = choose_device(config.run.device), PRECISIONS[config.train.precision]
    fresh = not request.resume or not has_begun(folder)
    origin = find_origin(config) if config.model.init_from and fresh else None
    theirs = origin.tokenizer if origin else None
    source = load_source(config, theirs if fresh else load_tokenizer(folder / "tokenizer.json"))
    seed, T = config.run.seed, config.model.context_length
    generator = torch.Generator().manual_seed(seed_for(seed, "init"))
    try:
        model = GPT(config.model, source.tokenizer.vocab_size, generator).to(device).compute_in(dtype)
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"the model does not fit in memory: {str(error).splitlines()[0]}") from None
    news = origin.fill(model) if origin else []
    trained, forward = distributed.share(model, config.train, ranks)
    optimizers = make_optimizers(trained, config.optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    probes = make_probes(source, T, config.probe.sequences, seed) if config.probe.every else None
    meter = Meter(trained.flops_per_token(), distributed.at_once(ranks, ceiling(device, dtype)))
    parts = (ranks, model, trained, forward, optimizers, scaler, meter, probes)
    return Run(config, folder, source, *parts, checkpoints.State(fingerprint=source.fingerprint), fresh, news)


def resume(run: Run) -> None:
    """Load the newest intact checkpoint; what differs from when it was written becomes a warning."""
    run.state, faults = checkpoints.load_newest(run.folder / "checkpoints", run.trained, run.optimizers)
    if run.state.fingerprint != run.source.fingerprint:
        raise UserError(f"the data differ from those that {run.folder} was trained on; start a new run")
    if run.state.step > run.config.train.steps:
        raise UserError(f"train.steps {run.config.train.steps} is fewer than the {run.state.step} done")
    run.scaler.load_state_dict(run.state.scaler or run.scaler.state_dict())  # {} of a run that was not fp16
    run.warnings += faults


def loop(run: Run, log: JsonLines, interrupted: Callable[[], bool]) -> None:
    """Train from `run.state` to the last step, or to a signal; both end with a checkpoint."""
    c, state = run.config, run.state
    step_tokens = c.global_batch * c.model.context_length
    run.began = time.perf_counter() - state.seconds
    run.trained.train()
    with progress(state.step, c.train.steps) as (bar, say):
        stopping = look(run, log, say, interrupted) if run.fresh else interrupted()
        while state.step < c.train.steps and not stopping:
            started = time.perf_counter()
            share = rate_share(state.step + 1, c.train.steps, c.optimizer)
            loss, grad_norm = update(run, state.step + 1, share)
            state.step, state.tokens = state.step + 1, state.tokens + step_tokens
            run.meter.count(step_tokens, time.perf_counter() - started)
            if due(c.log.every, state.step, c.train.steps):
                record: dict[str, Any] = {"loss": loss, "lr": share * c.optimizer.lr, "grad_norm": grad_norm}
                if run.scaler.is_enabled():
                    record |= {"loss_scale": run.scaler.get_scale(), "skipped": state.skipped}
                rate = run.meter.read()
                log.write("train", state.step, **record, tokens=state.tokens, **rate)
                mfu = "" if rate["mfu"] is None else f", {rate['mfu']:.0%} MFU"
                bar.set_postfix_str(f"loss {loss:.3f}, {rate['tokens_per_s']:,} tokens/s{mfu}", refresh=False)
            bar.update()
            stopping = look(run, log, say, interrupted)
    if state.step == c.train.steps:
        state.seconds = seconds = time.perf_counter() - run.began
        log.write("end", state.step, seconds=seconds, telemetry_share=state.telemetry_seconds / seconds)


def update(run: Run, step: int, share: float) -> tuple[float, float | None]:
    """One step at `share` of the peak rates: loss and gradient norm (None: fp16, skipped), or `Stopped`."""
    c, model, scaler, ranks = run.config, run.trained, run.scaler, run.ranks
    batch, seed = to_device(run.source.batch(step), model.device), seed_for(c.run.seed, "dropout", step)
    losses, own = partial(micro_losses, batch, c.train.batch_size, seed, ranks.number), 0.0
    for micro in losses(ranks.rank, run.forward):
        scaler.scale(micro).backward()
        own += micro.item()
    loss = ranks.add(torch.tensor(own, dtype=torch.float64)).item()
    scale, skip = scaler.get_scale(), unscale(scaler, run.optimizers)
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    grad_norm = distributed.gathered(norm)
    if not math.isfinite(loss + (0 if skip else grad_norm.item())) or scaler.get_scale() < 1:
        with distributed.whole(run.model, model):
            again = (micro for rank in range(ranks.number) for micro in losses(rank, run.model))
            culprit = first_nonfinite(run.model, again, loss)
            stop(run.folder, step, culprit, keep(run.folder, c, run.model, batch, step, culprit, scale))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), c.train.clip or math.inf, grad_norm)
    run.state.skipped += skip
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        if not skip:
            optimizer.step()
        optimizer.zero_grad()
    return loss, None if skip else grad_norm.item()


def look(run: Run, log: JsonLines, say: Callable[[str], None], interrupted: Callable[[], bool]) -> bool:
    """Evaluate, probe and save where due, unnoticed by the next update; True if a signal came: saved then."""
    c, state, last, folder = run.config, run.state, run.config.train.steps, run.folder / "checkpoints"
    save = state.step in (0, last) or due(c.checkpoint.every, state.step, last)
    save = save or (c.checkpoint.log_spaced and checkpoints.is_log_spaced(state.step))
    evaluates, probes = due(c.eval.every, state.step, last), due(c.probe.every, state.step, last)
    if (evaluates or probes) and (broken := nonfinite_parameters(run.trained)):
        stop(run.folder, state.step, broken[0])
    with distributed.whole(run.model, run.trained, evaluates or probes):
        if evaluates:
            windows = partial(run.source.validation, c.train.batch_size, c.eval.tokens)
            assess = partial(evaluate, run.model, bytes_per_token=run.source.bytes_per_token)
            if not math.isfinite((result := assess(windows(), ranks=run.ranks))["loss"]):
                stop_evaluating(run.folder, c, run.model, state.step, windows())
            log.write("eval", state.step, **result)
            say(f"step {state.step:>6}  validation loss {result['loss']:.4f}")
            if state.best is None or result["loss"] < state.best[0]:
                state.best = result["loss"], state.step
                save = save or c.checkpoint.keep_best
        if probes and run.probes is not None:
            started = time.perf_counter()
            record = measure(run.model, run.probes, c.data.bos, run.ranks)
            log.write("attention", state.step, **record, seconds=time.perf_counter() - started)
            say(f"step {state.step:>6}  {summary(record)}")
            state.alarms = alarms(record, c, state.step, state.alarms)
            log.alarm(state.step, state.alarms, say)
            state.telemetry_seconds += time.perf_counter() - started
    stopping = interrupted()
    log.flush(durable=save or stopping)
    if save or stopping:
        if not (evaluates or probes) and (broken := nonfinite_parameters(run.trained)):
            stop(run.folder, state.step, broken[0])
        state.seconds, state.scaler = time.perf_counter() - run.began, run.scaler.state_dict()
        checkpoints.save(folder, run.trained, run.optimizers, state)
        checkpoints.prune(folder, c.checkpoint, state.best[1] if state.best else None)
    return stopping


if __name__ == "__main__":
    distributed.leave(main(REQUEST))
