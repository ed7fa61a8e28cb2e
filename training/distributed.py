"""One run by several processes: how they meet, share a model, and tell why they end."""

import copy
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from configs import UserError
from configs.ranks import ALONE, Ranks, is_first, processes
from configs.schema import Train as TrainConfig
from model.transformer import GPT
from training import Stopped
from training.devices import compiled

TIMEOUT = timedelta(minutes=30)  # of a rank that waits for another, which may be writing a checkpoint


class Lost(Stopped):
    """Another process of the run is gone; if it could, it has said why."""


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that torchrun has started, met; all but the first are silent inside.

    What they tell each other goes by way of the CPU (gloo), gradients and weights by that of the device.
    `device` is what `run.device` asks for; each has a chip of its own. Raises `UserError` where it cannot,
    `Lost` where another process is gone.
    """
    if processes() == 1:
        yield ALONE
        return
    cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    if cuda and (own := int(os.environ["LOCAL_RANK"])) >= (chips := torch.cuda.device_count()):
        raise UserError(f"torchrun started more processes than there are chips, {chips}; or --run.device cpu")
    if cuda:
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), _add)
    try:
        if device == "mps":  # told here, where the ranks have met: one message, not one of each
            raise UserError("run.device mps is for one process: start it without torchrun")
        with Path(os.devnull).open("w") as nowhere:
            out, err = (nowhere, nowhere) if ranks.rank else (sys.stdout, sys.stderr)
            with redirect_stdout(out), redirect_stderr(err):
                yield ranks
        # The first may have more to do, and torchrun would end it with the others. When it comes here all
        # is written: it needs nobody any more, and a signal may have ended the others as they waited.
        with suppress(RuntimeError) if is_first() else nullcontext():
            _add(torch.zeros(1))
    except RuntimeError as error:
        if not re.search("gloo/|NCCL|by peer|TCPStore", str(error)):
            raise
        raise Lost("another process of this run is gone; go on with --resume") from error
    dist.destroy_process_group()  # not after an error: `fail` needs it, and others may never come to an end


def fail(error: Exception) -> int:
    """Say why the run ends, once where several ranks say the same; gives the exit code."""
    code = 2 if isinstance(error, UserError) else 1
    message = f"{'error' if code == 2 else 'stopped'}: {error}"
    if not dist.is_initialized():
        print(message, file=sys.stderr)
        return code
    try:
        _tell_once(message, error)
    except dist.DistError:  # what they tell each other by was torchrun's, which is gone
        print(message, file=sys.stderr)
    return code


def _tell_once(message: str, error: Exception) -> None:
    store = dist.distributed_c10d._get_default_store()
    told_before = store.add("told", 0)
    if store.add(message, 1) == 1 and not (isinstance(error, Lost) and told_before):
        print(message, file=sys.stderr)
    store.add("told", 1)
    if is_first():
        store.set("over", "")
    elif not isinstance(error, Lost):
        # With the end of this process torchrun ends the first one, which may be writing down what failed.
        with suppress(RuntimeError):
            store.wait(["over"], timedelta(seconds=10))


def leave(code: int) -> NoReturn:
    """End the process. One of several ends at once, all being written and closed.

    Threads of gloo that are left may want Python while it closes: then C++ aborts (SIGABRT), and the run
    would seem to have failed.
    """
    if processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def anywhere(ranks: Ranks, here: Callable[[], bool]) -> Callable[[], bool]:
    """Whether something is so on any rank; all must ask together."""
    return lambda: bool(ranks.add(torch.tensor(float(here()))))


def at_once(ranks: Ranks, rate: float | None) -> float | None:
    """Of all ranks together; None where it is not known of this one."""
    return None if rate is None else ranks.add(torch.tensor(rate, dtype=torch.float64)).item()


def share(model: GPT, config: TrainConfig, ranks: Ranks) -> tuple[GPT, Callable[..., Tensor]]:
    """The model whose parameters are trained, and its forward pass: gradients come out summed over the ranks.

    With `fsdp` it is another one, of which every rank has a part: `whole` fills `model` from it.
    """
    if ranks.number > 1 and config.parallel == "fsdp":
        model = _split(model)
    forward = compiled(model) if config.compile else model
    if ranks.number == 1 or config.parallel == "fsdp":
        return model, forward
    return model, _summing(forward, config.grad_accum)


def _summing(model: Callable[..., Tensor], micro_steps: int) -> Callable[..., Tensor]:
    """DDP, whose gradients are summed (it would average them) in the last micro-step of a step only."""
    ddp = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, _sum)
    passes = itertools.count(1)

    def forward(*inputs: Any) -> Tensor:
        ddp.require_backward_grad_sync = next(passes) % micro_steps == 0
        return ddp(*inputs)

    return forward


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _split(model: GPT) -> GPT:
    """A copy by FSDP2, block by block; its gradients are summed over the ranks, not averaged."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # slow

    parts = copy.deepcopy(model)
    for module in (*parts.blocks, parts):
        fully_shard(module)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    _empty(model)
    return parts


@contextmanager
def whole(model: GPT, trained: GPT, wanted: bool = True) -> Iterator[None]:
    """Inside, `model` has the weights and gradients of `trained`, gathered by all ranks together if `wanted`.

    Nothing of it needs another rank then. Where both are one, that is always so.
    """
    if model is trained or not wanted:
        yield
        return
    for parameter, part in zip(model.parameters(), trained.parameters(), strict=True):
        parameter.data = gathered(part.detach())
        parameter.grad = None if part.grad is None else gathered(part.grad)
    try:
        yield
    finally:
        _empty(model)


def _empty(model: GPT) -> None:
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.new_empty(0), None


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor of which every rank has a part; any other is whole already."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def collected(tensor: Tensor) -> Any:
    """The same in the memory of the first rank's CPU, and nothing elsewhere: one after the other they fit."""
    full = gathered(tensor)
    return full if full is tensor else full.cpu() if is_first() else None


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as `like` is shared out."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _add(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor
