"""Tokenizers of published models, from a Hugging Face folder or a GGUF file, served by `tokenizers`."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from configs import UserError
from configs.files import LARGE, read_json, refuse_large
from configs.gguf_file import read_gguf
from configs.screen import foreign
from data.bpe import BOS, MOST_TOKENS

T = TypeVar("T")
# Byte-level encodings write a letter for each byte: itself, or where it is none, one from chr(256) on.
_LETTERS = sorted(ByteLevel.alphabet())
_THEMSELVES = [ord(letter) for letter in _LETTERS if ord(letter) < 256]
_OTHERS = [byte for byte in range(256) if byte not in _THEMSELVES]
BYTES = dict(zip(_LETTERS, [*_THEMSELVES, *_OTHERS], strict=True))


def by_pattern(pattern: str) -> PreTokenizer:
    """Cuts text into what matches, and that into bytes."""
    cut = Split(Regex(pattern), "isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


# How text is cut before merging, by the name that a GGUF file has for it.
GPT_2 = ByteLevel(add_prefix_space=False)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CUTS: dict[str, PreTokenizer] = {
    "gpt-2": GPT_2,
    "smollm": Sequence([Digits(individual_digits=True), GPT_2]),
    "llama-bpe": by_pattern(LLAMA_3),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens in a GGUF file


class PublishedTokenizer:
    """Serves what `tokenizers` has read: a tokenizer of model BPE or WordLevel.

    `vocab_size` is the number of rows of the model's embedding, which may be more than there are tokens.
    `symbols` are the ids that stand for text, ascending, without added tokens. `bos` is one of the marks
    (special tokens), which a text does not stand for, and `eos` if there is one. Raises ValueError for what
    does not fit.
    """

    kind = "hf"

    def __init__(self, served: Tokenizer, vocab_size: int, bos: int | None, eos: int | None = None):
        if not isinstance(served.model, models.BPE | models.WordLevel):
            raise ValueError(f"its model is {type(served.model).__name__}; BPE and WordLevel can be read")
        if isinstance(served.model, models.BPE):
            served.model.dropout = None
        served.no_truncation()
        served.no_padding()
        served.post_processor = None  # it would take spaces out of spans
        served.encode_special_tokens = True  # as text
        tokens, added = served.get_vocab(with_added_tokens=False), served.get_added_tokens_decoder()
        self.symbols = np.array(sorted({*tokens.values()} - {*added}), np.int64)
        texts = {i: token.content.encode() for i, token in added.items() if not token.special}
        if bos is not None and (bos in texts or bos not in added):
            raise ValueError(f"its BOS {foreign(bos)} is none of its special tokens")
        top = max([*self.symbols.tolist(), *texts, bos or 0])
        if not (len(self.symbols) and isinstance(vocab_size, int) and top < vocab_size <= MOST_TOKENS):
            about = f"{len(self.symbols)} tokens of text and ids up to {top}"
            raise ValueError(f"it has {about}, the model {foreign(vocab_size)} tokens")
        self.served, self.vocab_size, self.bos = served, vocab_size, bos
        self.eos = eos if eos in [i for i in added if i not in texts and i < vocab_size] else None
        self._strict = served.token_to_id(served.model.unk_token or "") is None
        self._known = set[str]()
        decoder = json.dumps(json.loads(served.to_str())["decoder"], ensure_ascii=False)
        self._bytes = {i: _spelled(token, decoder) for token, i in tokens.items() if i not in added} | texts

    def encode(self, text: str) -> np.ndarray:
        """Ids, uint32. Marks in the text are text; half a surrogate pair, which is no text, becomes U+FFFD.

        Other threads go on meanwhile. Raises `UserError` for what the tokenizer does not know.
        """
        return self.spans(text)[0]

    def spans(self, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The ids, and of each the places (begin, end) of its characters: none where it stands for none."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            if self._strict:
                _calm(lambda: self._refuse_unknown(text, self.served.pre_tokenizer))
            found = _calm(lambda: self.served.encode(text, add_special_tokens=False))
        except ValueError as error:
            raise UserError(f"the tokenizer of the published model cannot encode the text: {error}") from None
        return np.array(found.ids, np.uint32), found.offsets

    def _refuse_unknown(self, text: str, cuts: PreTokenizer | None) -> None:
        """Raises ValueError for what has no token: BPE would skip it, WordLevel does not name it."""
        parts, unknown = {*text}, []
        if cuts and isinstance(self.served.model, models.WordLevel):
            parts = {piece for piece, _ in cuts.pre_tokenize_str(text)}
        for part in sorted(parts - self._known):
            with suppress(Exception):  # of WordLevel
                ids = self.served.encode(part, add_special_tokens=False).ids
                left_out = cuts and not cuts.pre_tokenize_str(part)  # white space, by some
                if (ids or left_out) and "\ufffd" not in self.decode(ids).replace(part, ""):
                    continue
            unknown.append(part)
        if unknown:
            listed = " ".join(map(repr, unknown[:20]))
            raise ValueError(f"characters that the tokenizer does not know: {listed}")
        self._known |= parts

    def decode(self, ids: Any) -> str:
        """Text, without marks; bytes that are no UTF-8 become U+FFFD."""
        return self.served.decode([int(i) for i in ids])

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes of the tokens, which may end within a character; ids that are no text have none.

        The space that some encodings put in front of every text, and `decode` takes away, is one of them.
        """
        return b"".join(self._bytes.get(int(i), b"") for i in ids)

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs."""
        about = {"kind": self.kind, "bos": self.bos is not None, "bos_id": self.bos, "eos_id": self.eos}
        return {**about, "vocab_size": self.vocab_size, "tokenizer": json.loads(self.served.to_str())}


def from_json(saved: dict[str, Any]) -> PublishedTokenizer:
    """A tokenizer from a file that nobody vouches for: raises ValueError, TypeError or LookupError."""
    content, bos = json.dumps(saved["tokenizer"]), saved["bos_id"] if saved["bos"] else None
    served = _calm(lambda: Tokenizer.from_str(content))
    return PublishedTokenizer(served, saved["vocab_size"], bos, saved.get("eos_id"))


def read_tokenizer(path: Path, bos: bool = True) -> PublishedTokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file; `bos` False leaves BOS out where it has one.

    Raises `UserError`, which does not name `path`, for a folder without one, and for one of another make.
    """
    try:
        served, vocab_size, first, last = _of_folder(path) if path.is_dir() else _of_gguf(path)
        return PublishedTokenizer(served, vocab_size, first if bos else None, last)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"cannot read the tokenizer: {foreign(str(reason), 200)}") from None


def byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], cuts: PreTokenizer, whole: bool = False
) -> Tokenizer:
    """A byte-pair encoding; with `whole`, pieces that are tokens are not merged. Raises ValueError."""
    served = Tokenizer(_calm(lambda: models.BPE(vocab, merges, ignore_merges=whole)))
    served.pre_tokenizer, served.decoder = cuts, decoders.ByteLevel()
    return served


def _of_folder(path: Path) -> tuple[Tokenizer, int, int | None, int | None]:
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    settings = {name: read_json(path / name) for name in names if (path / name).is_file()}
    files = [path / name for name in ("tokenizer.json", "vocab.json", "merges.txt")]
    for file in filter(Path.is_file, files):
        refuse_large(file, LARGE)
    tokenizer, vocab, merges = map(str, files)
    if Path(tokenizer).is_file():
        served = _calm(lambda: Tokenizer.from_file(tokenizer))
    elif Path(merges).is_file():
        served = byte_level(*_calm(lambda: models.BPE.read_file(vocab, merges)), CUTS["gpt-2"])
        served.add_special_tokens([BOS])
    else:
        way = "save_pretrained of transformers.AutoTokenizer writes the first"
        raise UserError(f"it has neither tokenizer.json nor vocab.json and merges.txt: {way}")
    config, ids = settings.get("config.json", {}), []
    for kind in ("bos", "eos"):
        mark = config.get(f"{kind}_token_id")
        if kind == "bos" and mark not in served.get_added_tokens_decoder():
            mark = None  # a default, which nobody gave the tokenizer
        if named := [found[f"{kind}_token"] for found in settings.values() if f"{kind}_token" in found]:
            name = named[0]["content"] if isinstance(named[0], dict) else named[0]
            served.add_special_tokens([name] if name and kind == "bos" else [])
            mark = served.token_to_id(name) if name else None
        ids.append(mark)
    return served, config["vocab_size"], *ids


def _of_gguf(path: Path) -> tuple[Tokenizer, int, int | None, int | None]:
    fields = read_gguf(path).fields.items()
    known = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields}
    model, cuts = known.get("model"), known.get("pre", "default")
    if cuts == "default" and known.get("general.architecture") == "gpt2":
        cuts = "gpt-2"
    if model != "gpt2" or cuts not in CUTS:
        possible = f"model gpt2 with pre {', '.join(CUTS)}: give the Hugging Face folder"
        told = f"its tokenizer is of model {foreign(model)} with pre {foreign(cuts)}"
        raise UserError(f"{told}; known is {possible}")
    bos, kinds = known.get("bos_token_id"), known["token_type"]
    ids = {token: i for i, token in enumerate(known["tokens"]) if kinds[i] != UNUSED}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in known["merges"])]
    served = byte_level(ids, pairs, CUTS[cuts], whole=cuts == "llama-bpe")
    served.add_special_tokens([token for token, i in ids.items() if kinds[i] == CONTROL or i == bos])
    served.add_tokens([token for token, i in ids.items() if kinds[i] == USER_DEFINED])
    return served, len(kinds), bos, known.get("eos_token_id")


def _calm(call: Callable[[], T]) -> T:
    """What `call` gives; ValueError in a line for what the Rust code raises, or panics with."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ValueError(foreign(str(error), 150)) from None


def _spelled(token: str, decoder: str) -> bytes:
    """The bytes of a token, as `decoder` (in JSON) reads it."""
    if "ByteLevel" in decoder and {*token} <= BYTES.keys():
        return bytes(BYTES[letter] for letter in token)
    if "ByteFallback" in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return (token.replace("▁", " ") if "▁" in decoder else token).encode()
