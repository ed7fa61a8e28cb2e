"""Syntactic heads: those that attend from a word to the one it stands in a relation with (Voita et al. 2019).

A query sees earlier words only, so it is the later word of an arc, whichever that is (docs/syntax.md).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from analysis.capture import observe
from analysis.resampling import bounds, redrawn
from configs import UserError
from configs.screen import looks
from configs.seeds import seed_for
from data.spans import encode_with_spans
from data.tokenizers import Tokenizer
from data.treebank import Sentence
from model.attention import Observation
from model.backends import naive
from model.transformer import GPT

# In this order an arc goes by the relation's own name; in the other it belongs to a row like `nsubj>`.
HEAD_LATER = ("nsubj", "det", "amod", "case", "aux", "mark")
HEAD_EARLIER = ("obj", "obl", "nmod", "conj", "advmod")
RULE = "accuracy on its arcs 0.1 above both baselines, on both halves of the treebank, n >= 200"
FEWEST = 8  # sentences that an interval is drawn from
TOKENS, WEIGHTS = 2**10, 2**22  # held at once: tokens of a batch, weights of a layer


class Arc(NamedTuple):
    """The token that is the query; the later and the earlier word as numbers of candidates."""

    relation: str
    query: int
    later: int
    earlier: int


class Text(NamedTuple):
    """A sentence as far as its last query, and the candidate that each token is part of (-1: none)."""

    half: int
    token_T: Tensor
    word_T: Tensor
    arcs: list[Arc]


def add_syntax(
    document: dict[str, Any],
    model: GPT,
    fresh: GPT,
    tokenizer: Tokenizer,
    sentences: Sequence[Sentence],
    name: str,
    seed: int,
) -> None:
    """Add to `heads.json` how often each head is right about the arcs of the treebank `name`, and labels.

    `fresh` has the shape of `model` and random weights; `seed` draws the halves and the intervals.
    Raises `UserError` for a treebank without a relation of which both halves have usable arcs.
    """
    generator = torch.Generator().manual_seed(seed_for(seed, "syntax"))
    texts, cut, skipped = texts_of(sentences, tokenizer, model.config.context_length, generator)
    arcs = [(n, text.half, arc) for n, text in enumerate(texts) for arc in text.arcs]
    halves: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, (_, half, arc) in enumerate(arcs):
        halves[arc.relation][half].append(number)
    for relation in [relation for relation, pair in halves.items() if not all(pair)]:
        skipped["arcs of relations that one half lacks"] += sum(map(len, halves.pop(relation)))
    if not halves:
        reasons = "; ".join(f"{n} {reason}" for reason, n in skipped.items())
        raise UserError(
            f"treebank {name}: nothing to score in {len(sentences)} sentences: both halves of them need arcs "
            f"of one of {', '.join(HEAD_LATER + HEAD_EARLIER)}; skipped: {reasons or 'nothing'}"
        )
    line = "{n_fmt}/{total_fmt} sentences read, {elapsed} gone, {remaining} to go"
    with tqdm(total=2 * len(texts), unit="sentence", delay=2, **looks(line)) as bar:
        right_ALH, random_ALH = (_right(one, texts, bar) for one in (model, fresh))
    text_A = torch.tensor([n for n, *_ in arcs])
    distance_A = torch.tensor([arc.later - arc.earlier for *_, arc in arcs])
    summary, relations = document["summary"], {}
    for relation, (choosing, scoring) in sorted(halves.items()):
        row, accuracy_LH, margin_LH = _scored(right_ALH, random_ALH, distance_A, choosing, scoring)
        row["ci"] = _interval(right_ALH[scoring][:, *row["head"]], text_A[scoring], generator)
        relations[relation] = row
        *_, confirmed_LH = _scored(right_ALH, random_ALH, distance_A, scoring, choosing)
        # 0.6 - 0.5 is a margin of 0.1 too.
        holds_LH = (margin_LH.minimum(confirmed_LH) >= 0.1 - 1e-9) & (len(scoring) >= 200)
        for head in document["heads"]:
            place = head["layer"], head["head"]
            head.setdefault("syntax", {})[relation] = accuracy_LH[place].item()
            head["labels"] += [f"syntactic:{relation}"] * int(holds_LH[place])
        if found := sorted(holds_LH.nonzero().tolist(), key=lambda place: -accuracy_LH[*place]):
            summary["labels"][f"syntactic:{relation}"] = found
    summary["untyped"] = sum(not head["labels"] for head in document["heads"])
    summary["rules"]["syntactic:<relation>"] = RULE
    about = {"treebank": name, "sentences": len(sentences), "words": sum(len(s.words) for s in sentences)}
    summary["syntax"] = about | {"cut": cut, "skipped": dict(skipped), "relations": relations}


def texts_of(
    sentences: Sequence[Sentence], tokenizer: Tokenizer, context: int, generator: torch.Generator
) -> tuple[list[Text], int, Counter[str]]:
    """Those with arcs, the longest first; how many sentences do not fit; what was skipped, by reason."""
    halves = (torch.randperm(len(sentences), generator=generator) % 2).tolist()
    texts, cut, skipped = [], 0, Counter[str]()
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    for half, sentence in zip(halves, sentences, strict=True):
        try:
            ids, spans = encode_with_spans(tokenizer, sentence.text)
        except UserError:
            skipped["sentences that the tokenizer cannot encode"] += 1
            continue
        tokens = [*bos, *ids.tolist()]
        # The first position is part of no word, nor is a token that stands for no character.
        begins = [-1, *(begin if begin < end else -1 for begin, end in spans[not bos :])]
        cut += len(tokens) > context
        words, arcs = _aligned(sentence, begins, context, skipped)
        if arcs:
            end = max(arc.query for arc in arcs) + 1
            texts.append(Text(half, torch.tensor(tokens[:end]), torch.tensor(words[:end]), arcs))
    return sorted(texts, key=lambda text: -len(text.token_T)), cut, skipped


def _aligned(
    sentence: Sentence, begins: Sequence[int], context: int, skipped: Counter[str]
) -> tuple[list[int], list[Arc]]:
    """The candidate that each token is part of, which is where it begins (-1: in none); arcs."""
    words = sentence.words
    sharing = Counter((word.begin, word.end) for word in words)
    shared = {n for n, word in enumerate(words) if sharing[word.begin, word.end] > 1}
    holder = {c: n for n, word in enumerate(words) if n not in shared for c in range(word.begin, word.end)}
    last = {holder[begin]: token for token, begin in enumerate(begins) if begin in holder}
    candidate = {n: place for place, n in enumerate(sorted(last))}
    arcs = []
    for n, word in enumerate(words):
        if word.head is None or word.relation not in HEAD_LATER + HEAD_EARLIER:
            continue
        earlier, later = sorted((n, word.head))
        if {earlier, later} & shared:
            skipped["arcs of words that share their letters"] += 1
        elif not {earlier, later} <= last.keys():
            skipped["arcs of words without a token of their own"] += 1
        elif last[later] >= context:
            skipped["arcs beyond the context"] += 1
        elif candidate[later] < 3:
            skipped["arcs with less than 3 candidates"] += 1
        else:
            way = "" if (later == word.head) == (word.relation in HEAD_LATER) else ">"
            arcs.append(Arc(word.relation + way, last[later], candidate[later], candidate[earlier]))
    return [candidate[holder[begin]] if begin in holder else -1 for begin in begins], arcs


def _right(model: GPT, texts: Sequence[Text], bar: tqdm) -> Tensor:
    """Which arcs, in the order of the texts, each head is right about: A x L x H."""
    parts, first = [], 0
    while first < len(texts):
        batch = texts[first : first + max(1, TOKENS // len(texts[first].token_T))]
        arcs = [torch.tensor([arc[1:] for arc in text.arcs]) for text in batch]
        arc_BA3 = pad_sequence(arcs, batch_first=True, padding_value=-1)
        word_BT = pad_sequence([text.word_T for text in batch], batch_first=True, padding_value=-1)
        token_BT = pad_sequence([text.token_T for text in batch], batch_first=True)
        layers: list[Tensor] = []
        collect = partial(_right_in_layer, layers, word_BT.to(model.device), arc_BA3.to(model.device))
        with model.reading(), observe(model, collect):
            model.hidden(token_BT.to(model.device))  # causal: padding behind a text changes nothing in it
        parts.append(torch.stack(layers, dim=-2)[arc_BA3[..., 0] >= 0])
        first += len(batch)
        bar.update(len(batch))
    return torch.cat(parts)


def _right_in_layer(layers: list[Tensor], word_BS: Tensor, arc_BA3: Tensor, seen: Observation) -> None:
    """Append whether the earlier word of an arc has more mass than any other candidate: B x A x H."""
    word_W = torch.arange(int(word_BS.max()) + 1, device=word_BS.device)
    part_of_B1SW = (word_BS.unsqueeze(-1) == word_W).float().unsqueeze(1)
    right = []
    for some_BA3 in arc_BA3.split(max(1, WEIGHTS // seen.q_BHTD[..., 0].numel()), dim=1):
        query_B1A1, later_B1A1, earlier_B1A1 = some_BA3[:, None, :, None].unbind(-1)
        mass_BHAW = weights(seen, query_B1A1.clamp(min=0)) @ part_of_B1SW
        target_B1AW = word_W == earlier_B1A1
        other_BHA = mass_BHAW.where((word_W < later_B1A1) & ~target_B1AW, 0).amax(-1)
        # Equal masses predict nothing; 1e-5 is what float32 may tell them apart by.
        right.append(mass_BHAW.where(target_B1AW, 0).amax(-1) > other_BHA * (1 + 1e-5))
    layers.append(torch.cat(right, dim=-1).mT.cpu())


def weights(seen: Observation, query_B1A1: Tensor) -> Tensor:
    """`A[i,j]` of A queries i of each sequence on all keys: B x H x A x S."""
    k_BHSD = seen.k_BGSD.repeat_interleave(seen.q_BHTD.size(1) // seen.k_BGSD.size(1), dim=1)
    s_BHAS = seen.scale * (seen.q_BHTD.take_along_dim(query_B1A1, dim=2) @ k_BHSD.mT)
    key_S = torch.arange(s_BHAS.size(-1), device=s_BHAS.device)
    visible_B1AS = (key_S <= query_B1A1) & (key_S > query_B1A1 - (seen.window or len(key_S)))
    return naive.softmax(s_BHAS.masked_fill(~visible_B1AS, -naive.INF), seen.sink_H)[0]


def _scored(
    right_ALH: Tensor, random_ALH: Tensor, distance_A: Tensor, choosing: list[int], scoring: list[int]
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A row of the table on the arcs `scoring`; accuracy and margin of all heads there, L x H each.

    The best head, the best offset and the best random head are those of the arcs `choosing`.
    """
    own, random = (
        divmod(int(right[choosing].double().mean(0).argmax()), right.size(2))
        for right in (right_ALH, random_ALH)
    )
    offset = int(distance_A[choosing].bincount().argmax())
    baselines = {
        "offset_accuracy": (distance_A[scoring] == offset).double().mean().item(),
        "random_init": random_ALH[scoring][:, *random].double().mean().item(),
    }
    accuracy_LH = right_ALH[scoring].double().mean(0)
    margin_LH = accuracy_LH - max(baselines.values())
    row = {"n": len(scoring), "head": list(own), "offset": -offset, **baselines}
    row |= {"accuracy": accuracy_LH[own].item(), "margin": margin_LH[own].item()}
    return row, accuracy_LH, margin_LH


def _interval(right_A: Tensor, text_A: Tensor, generator: torch.Generator) -> list[float] | None:
    """95 % bootstrap interval of the share of right arcs, over sentences; None of too few to tell."""
    _, text_A = text_A.unique(return_inverse=True)
    arcs_N, right_N = text_A.bincount(), text_A.bincount(right_A.double())
    if len(arcs_N) < FEWEST:
        return None
    drawn_RN = redrawn(len(arcs_N), generator)
    share_R = right_N[drawn_RN].sum(1) / arcs_N[drawn_RN].sum(1)
    return bounds(share_R, len(arcs_N)).tolist()
