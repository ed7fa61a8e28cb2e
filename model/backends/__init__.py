"""Attention backends behind one signature.

    attend(q_BHTD, k_BGSD, v_BGSD, *, scale, window=None, sink_H=None, segment=None, dropout_p=0.0,
           return_lse=False) -> (out_BHTD, lse_BHT or None)

Causal, aligned bottom right: query t stands at position `S - T + t` and sees keys up to there.
`scale` multiplies the dot products. `window`: a query sees the last `window` keys, its own included.
`sink_H`: a logit per head in the denominator, with no value; `lse` includes it. `segment` (B x S): the
document of each position, -1 for padding; attention stays inside a document. A row that sees nothing gives
out = 0, lse = -inf and zero gradients. `lse` is for reading: on `sdpa` it carries no gradient.
"""

from collections.abc import Callable

from model.backends import blocks, naive, sdpa

BACKENDS: dict[str, Callable] = {"naive": naive.attend, "sdpa": sdpa.attend, "blocks": blocks.attend}


def choose(name: str, dropout: float, context_length: int) -> str:
    """What `auto` stands for: fused kernels, but blocks where those would build a large T x T matrix.

    On CPUs PyTorch's kernels do that with dropout; up to 1,024 it is still two to three times faster.
    """
    if name != "auto":
        return name
    return "blocks" if dropout > 0 and context_length > 1024 else "sdpa"
