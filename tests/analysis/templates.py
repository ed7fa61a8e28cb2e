"""Treebanks of made-up sentences, one letter a word, and a model whose heads know what the letters mean.

`d` and 15 other letters are determiners, `n` and others nouns, `v` verbs, `m` objects, `k` another kind of
noun, and `p` words that say nothing. With one letter for each kind, or a kind always in the same place, a
random head would often find the right one.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from configs.schema import Model
from data.tokenizers import CharTokenizer
from data.treebank import Sentence, Word
from model.transformer import GPT

KINDS = {kind: kind + "".join(chr(0x4E00 + 15 * n + i) for i in range(15)) for n, kind in enumerate("dnvmkp")}
T, PAIRS = 64, (("n", "d"), ("v", "n"))  # kinds of a query and of the word it looks for: det, nsubj


def tokenizer(bos: bool = True) -> CharTokenizer:
    return CharTokenizer("".join(KINDS.values()) + " ", bos)


def sentence(letters: str, *arcs: tuple[int, int, str], gap: str = " ") -> Sentence:
    """A word for each letter; an arc is a dependent, its head and the relation."""
    heads = {dependent: (head, relation) for dependent, head, relation in arcs}
    step = 1 + len(gap)
    words = [
        Word(n * step, n * step + 1, *heads.get(n, (None, "root")), line=n + 1) for n in range(len(letters))
    ]
    return Sentence(gap.join(letters), words)


def clause(draw: random.Random, gap: str, between: Sequence[int], nouns: str) -> Sentence:
    """A determiner, its noun, the verb, its object, with other words `between`: each arc is one more long."""
    kinds, places = "ppp" + "p" * draw.randint(0, 5), []
    for kind in ("d", draw.choice(nouns), "v", "m"):
        places.append(len(kinds))
        kinds += kind + "p" * draw.choice(between)
    d, n, v, m = places
    letters = "".join(draw.choice(KINDS[kind]) for kind in kinds)
    return sentence(letters, (d, n, "det"), (n, v, "nsubj"), (m, v, "obj"), gap=gap)


def clauses(
    count: int, seed: int = 0, gap: str = " ", between: Sequence[int] = range(6), nouns: str = "n"
) -> list[Sentence]:
    draw = random.Random(seed)
    return [clause(draw, gap, between, nouns) for _ in range(count)]


def knowing_model(pairs: tuple[tuple[str, str], ...] = PAIRS, bos: bool = True, **changes: Any) -> GPT:
    """Head h of layer 0 looks from kinds `pairs[h][0]` to a kind `pairs[h][1]`, the next head one place back.

    Other queries of these heads, and other heads, attend to everything alike.
    """
    known = tokenizer(bos)
    V = known.vocab_size
    keys = {"n_layer": 2, "n_head": 4, "d_model": 4 * T, "d_head": T, "context_length": T}
    keys |= {"position": "learned", "mlp": "none", "norm": "rmsnorm", "norm_gain": False} | changes
    model, strong, length = GPT(Model(**keys), V), 40.0, keys["context_length"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # Token and place, one-hot: of norm sqrt(2), which the norm in front of a layer makes sqrt(C).
        model.token_embedding.weight[:, :V] = torch.eye(V)
        model.position_embedding.weight[:, V : V + length] = torch.eye(length)
        layer = model.attentions()[0]
        W_q, W_k = (W.weight.unflatten(0, (-1, T)) for W in (layer.W_q, layer.W_k))
        dot = keys["d_model"] / 2 * layer.scale
        for head, (queries, key) in enumerate(pairs):
            W_q[head, 0, known.encode("".join(KINDS[kind] for kind in queries))] = strong / dot
            W_k[head, 0, known.encode(KINDS[key])] = 1.0
        back = len(pairs)
        W_q[back, :length, V : V + length] = strong / dot * torch.eye(length).roll(1, dims=1).triu()
        W_k[back, :length, V : V + length] = torch.eye(length)
    return model


def document(model: GPT) -> dict[str, Any]:
    """What stands in heads.json before."""
    heads = [
        {"layer": layer, "head": head, "labels": ["sink"] if (layer, head) == (0, 3) else []}
        for layer in range(model.config.n_layer)
        for head in range(model.config.n_head)
    ]
    summary = {"labels": {"sink": [[0, 3]]}, "rules": {"sink": "x"}, "untyped": len(heads) - 1}
    return {"heads": heads, "summary": summary}
