"""Does a head matter: what the losses are without it, and without heads drawn at random.

Where a head looks does not say that the model needs it (2509.22947).
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from analysis.capture import observe
from analysis.probes import Probe, Probes, plain, token_losses
from analysis.resampling import bounds, redrawn
from configs.screen import looks
from configs.seeds import seed_for
from model.attention import Observation
from model.transformer import GPT

PARTS = {"natural": "text", "repeat": "repeat_long"}  # losses, each of a probe
KINDS = ("mean", "zero")
DRAWS = 3  # of random heads, for each label
Heads = tuple[tuple[int, int], ...]  # (layer, head), in order


@contextmanager
def removed(model: GPT, heads: Iterable[tuple[int, int]], values_LHD: Tensor) -> Iterator[None]:
    """In forward passes inside, each of the `heads`, (layer, head), gives `W_o` its value at every place.

    `values_LHD`: zeros or, say, what `means` gives. By ordinary hooks, which are always removed.
    """
    attentions = model.attentions()
    with ExitStack() as hooks:
        for layer, head in heads:
            hook = partial(_replace, head=head, value_D=values_LHD[layer, head])
            hooks.enter_context(attentions[layer].heads.register_forward_hook(hook))
        yield


def means(model: GPT, probe: Probe) -> Tensor:
    """The mean output of each head before `W_o`, L x H x D, over the probe's sequences and places.

    Tokens alone count, not the padding behind documents that do not fill their row.
    """
    found, probe = [], probe.to(model.device)

    def collect(seen: Observation) -> None:
        found.append(seen.out_BHTD.transpose(1, 2)[probe.present].mean(0))

    with model.reading(), observe(model, collect):
        model.hidden(probe.tokens_BT, segment_BT=probe.segment_BT)
    return torch.stack(found)


def add_ablation(
    document: dict[str, Any], model: GPT, probes: Probes, which: Literal["labelled", "all"], seed: int
) -> None:
    """Give `heads.json` what removing heads does to the losses, in nats per token.

    Each labelled head, or every one (`all`), gets its `ablation`; `summary["ablation"]` has all heads of a
    label together, and as control the mean over draws of as many heads without any label: all of them where
    they are fewer, heads without this one where all have one, None where all have this one. `mean`: outputs
    become `means` of the same probe, `zero`: nothing. `natural` is the loss on the text probe, `repeat` that
    on the second block of the longer repeat. `ci`: 95 % bootstrap over the sequences, paired; None of one.
    """
    labels = {(entry["layer"], entry["head"]): entry["labels"] for entry in document["heads"]}
    groups: dict[str, Heads] = {}
    for head, names in labels.items():
        groups |= {name: (*groups.get(name, ()), head) for name in names}
    singles: dict[Any, Heads] = {head: (head,) for head in labels if labels[head] or which == "all"}
    controls = {name: _control(labels, name, len(heads), seed) for name, heads in groups.items()}
    drawn = [heads for _, draws in controls.values() for heads in draws]
    sets = dict.fromkeys([*singles.values(), *groups.values(), *drawn])  # each but once
    targets_PN, intact_PN, without = _losses(model, probes, list(sets))
    N, generator = targets_PN.size(1), torch.Generator().manual_seed(seed_for(seed, "ablation"))
    drawn_RN = redrawn(N, generator)

    def effect(*draws: Heads) -> dict[str, Any]:
        """A sequence weighs as many tokens as it has; of several draws the mean is taken."""
        change_KPN = torch.stack([without[heads] for heads in draws]).mean(0) - intact_PN
        mean_KP = change_KPN.sum(-1) / targets_PN.sum(-1)
        mean_KPR = change_KPN[..., drawn_RN].sum(-1) / targets_PN[:, drawn_RN].sum(-1)
        ends_KP2 = bounds(mean_KPR.movedim(-1, 0), N).movedim(0, -1)
        effects: dict[str, Any] = {kind: {} for kind in KINDS}
        for kind, mean_P, ends_P2 in zip(KINDS, mean_KP.tolist(), ends_KP2.tolist(), strict=True):
            for part, mean, ends in zip(PARTS, mean_P, ends_P2, strict=True):
                effects[kind][part] = {"change": plain(mean), "ci": plain(ends) if N > 1 else None}
        return effects

    for entry in document["heads"]:
        single = singles.get((entry["layer"], entry["head"]))
        entry["ablation"] = effect(single) if single else None
    baseline = zip(PARTS, plain((intact_PN.sum(-1) / targets_PN.sum(-1)).tolist()), strict=True)
    document["summary"]["ablation"] = {"baseline": dict(baseline), "groups": []}
    for name, heads in groups.items():
        pool, draws = controls[name]
        group: dict[str, Any] = {"label": name, "heads": [list(head) for head in heads], **effect(heads)}
        control = {"pool": pool, "draws": [[list(head) for head in draw] for draw in draws]}
        group["control"] = control | effect(*draws) if draws else None
        document["summary"]["ablation"]["groups"].append(group)


def _control(labels: dict[Any, list[str]], label: str, count: int, seed: int) -> tuple[str, list[Heads]]:
    """Which heads are drawn from, and up to `DRAWS` draws of `count` that differ.

    Heads that have a label may be what those of this label work with: without them the control would measure
    the same circuit. So of few heads without a label all are taken, and others where there is none.
    """
    untyped = [head for head, names in labels.items() if not names]
    other = [head for head, names in labels.items() if label not in names]
    pool, heads = ("untyped", untyped) if untyped else ("other", other)
    generator = torch.Generator().manual_seed(seed_for(seed, f"control of {label}"))
    orders = [torch.randperm(len(heads), generator=generator)[:count] for _ in range(10 * DRAWS)]
    draws = [tuple(sorted(heads[n] for n in order)) for order in orders if len(order)]
    return pool, list(dict.fromkeys(draws))[:DRAWS]


def _losses(model: GPT, probes: Probes, sets: list[Heads]) -> tuple[Tensor, Tensor, dict[Heads, Tensor]]:
    """How many targets count, and their summed loss: parts x sequences, P x N.

    And that loss without each of the `sets` of heads: kinds of removal x P x N.
    """
    parts, L = [probes[name].to(model.device) for name in PARTS.values()], model.config.n_layer
    mean = [means(model, probe) for probe in parts]
    values = [mean, [torch.zeros_like(mean_LHD) for mean_LHD in mean]]  # as KINDS
    without: dict[Heads, Tensor] = {}
    line = "{n_fmt}/{total_fmt} layers without heads, {elapsed} gone, {remaining} to go"
    layers = len(KINDS) * sum(L - heads[0][0] for heads in sets)
    with model.reading(), tqdm(total=layers, unit="layer", **looks(line) | {"delay": 2}) as bar:
        streams = [model.embed(probe.tokens_BT) for probe in parts]
        for layer, block in enumerate(model.blocks):
            # Up to the first layer that loses a head, all is as in the intact model: that is run once.
            for heads in [one for one in sets if one[0][0] == layer]:
                sums = []
                for of_kind in values:
                    for probe, x_BTC, value_LHD in zip(parts, streams, of_kind, strict=True):
                        with removed(model, heads, value_LHD):
                            sums.append(_sums(model, layer, x_BTC, probe))
                    bar.update(L - layer)
                without[heads] = torch.stack(sums).unflatten(0, (len(KINDS), len(PARTS)))
            streams = [block(x, None, probe.segment_BT) for x, probe in zip(streams, parts, strict=True)]
        intact_PN = torch.stack([_sums(model, L, x, probe) for x, probe in zip(streams, parts, strict=True)])
    return torch.stack([_counted(probe).sum(1) for probe in parts]), intact_PN, without


def _sums(model: GPT, layer: int, x_BTC: Tensor, probe: Probe) -> Tensor:
    """The loss of each sequence, summed over the targets that count, from the stream before `layer`."""
    for block in model.blocks[layer:]:
        x_BTC = block(x_BTC, None, probe.segment_BT)
    losses_BT = token_losses(model, x_BTC, probe.tokens_BT).cpu().double()
    return losses_BT.where(_counted(probe), 0.0).sum(1)


def _counted(probe: Probe) -> Tensor:
    """Which targets count, B x (T - 1): all tokens of a text, and of a repeat the second block."""
    first = 0 if probe.block_length is None else probe.block_length + 1  # where it begins nothing says
    place_T = torch.arange(1, probe.tokens_BT.size(1))
    return probe.present[:, 1:].cpu() & (place_T > first)


def _replace(module: nn.Module, inputs: Any, out_BTX: Tensor, head: int, value_D: Tensor) -> Tensor:
    changed_BTX, D = out_BTX.clone(), len(value_D)
    changed_BTX[..., head * D : (head + 1) * D] = value_D
    return changed_BTX
