"""Batches, and what a source of them is.

A source is an endless sequence of windows: `windows(first, count)` is a function of these and the seed alone.
It has `symbols` (the ids that occur in training, BOS left out), `fingerprint` (changes when the data do),
`bytes_per_token`, `description`, and for what is held back from training `validation` and `probe_text` (token
ids and the document of each, or None, as in `Batch`).
"""

from typing import NamedTuple

from torch import Tensor

IGNORED = -100  # a target that no loss counts: PyTorch's default `ignore_index`


class Batch(NamedTuple):
    """Token ids and the ids that follow them, int64."""

    inputs_BT: Tensor
    targets_BT: Tensor
    segment_BT: Tensor | None = None  # the document of each input, -1 for padding; None: all is one
