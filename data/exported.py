"""Our tokenizers as the files that `transformers` reads."""

import itertools
import json
import math
import re
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import TemplateProcessing

from data import tokenizers as ours
from data.bpe import BOS, BytePairTokenizer
from data.published import BYTES, PublishedTokenizer, by_pattern, byte_level

LETTERS = {byte: letter for letter, byte in BYTES.items()}


def to_published(tokenizer: ours.Tokenizer) -> dict[str, Any]:
    """What `tokenizer.json` and `tokenizer_config.json` hold, by name, for `transformers.AutoTokenizer`.

    It gives the ids that `tokenizer` gives, with BOS in front unless asked not to; BOS as text stays text.
    BOS ends a text, too, unless a published one has an EOS: documents follow each other across it.
    """
    served = _served(tokenizer)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    if tokenizer.bos is not None:
        name = served.id_to_token(tokenizer.bos)
        served.post_processor = TemplateProcessing([name, "$A"], special_tokens=[(name, tokenizer.bos)])
        config["bos_token"] = name
    if (end := eos_of(tokenizer)) is not None:
        config["eos_token"] = served.id_to_token(end)
    return {"tokenizer.json": json.loads(served.to_str()), "tokenizer_config.json": config}


def eos_of(tokenizer: ours.Tokenizer) -> int | None:
    """The id of the token that ends a text."""
    own = tokenizer.eos if isinstance(tokenizer, PublishedTokenizer) else None
    return tokenizer.bos if own is None else own


def _served(tokenizer: ours.Tokenizer) -> Tokenizer:
    if isinstance(tokenizer, PublishedTokenizer):
        return Tokenizer.from_str(tokenizer.served.to_str())
    marks = {} if tokenizer.bos is None else {BOS: tokenizer.bos}
    if isinstance(tokenizer, ours.CharTokenizer):
        ids = {character: i for i, character in enumerate(tokenizer.characters)}
        served = Tokenizer(models.WordLevel(ids | marks, unk_token=""))  # no token: unknown text is refused
        served.pre_tokenizer, served.decoder = Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    elif isinstance(tokenizer, BytePairTokenizer):
        encoding = tokenizer.encoding
        marks |= encoding._special_tokens
        vocab = {_spelled(token): rank for token, rank in encoding._mergeable_ranks.items()} | marks
        # Oniguruma takes {1,3}+ for a repeated group.
        pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", encoding._pat_str)
        # whole: tiktoken looks up a piece before it merges, too.
        served = byte_level(vocab, _merges(encoding._mergeable_ranks), by_pattern(pattern), whole=True)
    else:
        cuts = ByteLevel(add_prefix_space=False, use_regex=False)
        served = byte_level({LETTERS[byte]: byte for byte in range(256)} | marks, [], cuts)
    served.add_special_tokens([*marks])
    return served


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The pair of tokens that each token is merged from: what its bytes have become by then.

    In any text it comes about from that pair: what merges within it does so as if it stood by itself.
    """
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(left + right, math.inf) for left, right in itertools.pairwise(parts)]
            if (lowest := min(joined)) == math.inf:
                break  # no merges lead to it: it is found whole only
            at = joined.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((_spelled(parts[0]), _spelled(parts[1])))
    return merges


def _spelled(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)
