"""Text from a model, a token at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from configs import UserError
from model.cache import KVCache
from model.transformer import GPT


def distribution(
    logits_V: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities `p_V`, float64, that the next token is drawn from: `softmax(logits / temperature)`, cut.

    `top_k` keeps the k likeliest tokens (Fan et al. 2018, 1805.04833; None or 0: all). `top_p` then keeps the
    smallest set of likeliest tokens whose share of what `top_k` left is at least p: the nucleus of Holtzman
    et al. 2020 (1904.09751; None or 1: all), which has one token or more. Of equally likely tokens the lower
    id goes first. Temperature 0 is its limit, all weight on the likeliest token.
    """
    if temperature == 0:
        temperature, top_k = 1.0, 1
    sorted_V, order_V = logits_V.double().sort(descending=True, stable=True)
    score_V = (sorted_V - sorted_V[0]) / temperature  # at most 0: a small temperature cannot give inf - inf
    if top_k:
        score_V[top_k:] = -torch.inf
    p_V = score_V.softmax(0)
    if top_p is not None and top_p < 1:
        too_few = int((p_V.cumsum(0) < top_p).sum())
        p_V[too_few + 1 :] = 0
    return torch.empty_like(p_V).scatter(0, order_V, p_V / p_V.sum())


def generate(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    bos: int | None,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    cache: bool = True,
) -> Iterator[int]:
    """Yield `count` token ids that go on from `prompt`, each as soon as it is drawn; see `distribution`.

        generator = torch.Generator().manual_seed(1)
        ids = generate(run.model, prompt, 200, bos=run.tokenizer.bos, temperature=0.8, generator=generator)

    `bos` (None for a model without) is put in front and never drawn. When the window has no room for another
    token, a new one begins with BOS and the last half of a context; of a prompt that does not fit, that half
    is read. `cache=False` computes every window whole: the same numbers, at a window a token.

    The model is in evaluation mode, and gradients are off, only while a token is computed. Raises `UserError`
    for an empty prompt without BOS.
    """
    start = [] if bos is None else [bos]
    window, context_length = [*start, *prompt], model.config.context_length
    if not window:
        raise UserError("an empty prompt needs a model with BOS: give a prompt, or train with data.bos true")
    memory = KVCache(model.config, device=model.device) if cache else None
    for _ in range(count):
        if len(window) > context_length:
            window = [*start, *window[-(context_length // 2) :]]
            if memory:
                memory.clear()
        with model.reading():
            unread = window[memory.length if memory else 0 :]
            logits_V = model(torch.tensor([unread], device=model.device), memory)[0, -1].cpu()
        if bos is not None:
            logits_V[bos] = -torch.inf
        p_V = distribution(logits_V, temperature, top_k, top_p)
        window.append(int(torch.multinomial(p_V, 1, generator=generator)))
        yield window[-1]
