"""Text from a model, a token at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from configs import UserError
from model.cache import open_cache
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
    cache: str = "full",
) -> Iterator[int]:
    """Yield `count` token ids that go on from `prompt`, each as soon as it is drawn; see `distribution`.

        generator = torch.Generator().manual_seed(1)
        ids = generate(run.model, prompt, 200, bos=run.tokenizer.bos, temperature=0.8, generator=generator)

    `bos` (None for a model without) is put in front and never drawn. When the window has no room for another
    token, a new one begins with BOS and the last half of a context; of a prompt that does not fit, that half
    is read. Without a cache ("none") every window is computed whole: the same numbers, at a window a token.
    With one that rolls, as "window:256+4" (`model.cache.open_cache`), there are no new windows: a prompt of
    any length is read from its beginning, and text goes on without end in the same memory.

    The model is in evaluation mode, and gradients are off, only while a token is computed. Raises `UserError`
    at once for an empty prompt without BOS, and for a cache that the model cannot have.
    """
    start = [] if bos is None else [bos]
    text, context_length = [*start, *prompt], model.config.context_length
    if not text:
        raise UserError("an empty prompt needs a model with BOS: give a prompt, or train with data.bos true")
    memory = open_cache(cache, model.config, model.device)
    rolls = memory is not None and memory.rolls

    def draw() -> Iterator[int]:
        window = unread = text
        for _ in range(count):
            if len(window) > context_length and not rolls:
                window = unread = [*start, *window[-(context_length // 2) :]]
                if memory:
                    memory.clear()
            with model.reading():
                new_1T = torch.tensor([unread if memory else window], device=model.device)
                for piece_1T in memory.pieces(new_1T) if memory else [new_1T]:
                    logits_V = model(piece_1T, memory)[0, -1].cpu()
            if bos is not None:
                logits_V[bos] = -torch.inf
            p_V = distribution(logits_V, temperature, top_k, top_p)
            unread = [int(torch.multinomial(p_V, 1, generator=generator))]
            if not rolls:
                window.extend(unread)
            yield unread[0]

    return draw()
