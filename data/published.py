"""Tokenizers of published models: of a Hugging Face folder or a GGUF file, served by `tokenizers`."""

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding, Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from configs import UserError
from data.bpe import BOS, MOST_TOKENS

# Byte-level encodings write a letter for each byte: itself, or one from chr(256) on where it is no letter.
_LETTERS = sorted(ByteLevel.alphabet())
_THEMSELVES = [ord(letter) for letter in _LETTERS if ord(letter) < 256]
_OTHERS = [byte for byte in range(256) if byte not in _THEMSELVES]
BYTES = dict(zip(_LETTERS, [*_THEMSELVES, *_OTHERS], strict=True))
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# How text is cut before merging, by the name that a GGUF file has for it.
PRE: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": lambda: by_pattern(LLAMA_3),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens in a GGUF file
T = TypeVar("T")


class PublishedTokenizer:
    """Serves what `tokenizers` reads from a tokenizer.json; models BPE and WordLevel.

    `vocab_size` is the number of rows of the model's embedding, which may be more than there are tokens.
    `symbols` are the ids that stand for text, ascending, without added tokens. `bos` is one of the marks
    (special tokens), which are text where a text holds them. Raises ValueError for what does not fit.
    """

    kind = "hf"

    def __init__(self, served: Tokenizer, vocab_size: int, bos: int | None):
        if not isinstance(served.model, models.BPE | models.WordLevel):
            raise ValueError(f"its model is {type(served.model).__name__}; BPE and WordLevel can be read")
        if isinstance(served.model, models.BPE):
            served.model.dropout = None
        served.no_truncation()
        served.no_padding()
        served.post_processor = None  # it would put marks in front, and cut spans
        served.encode_special_tokens = True  # as text
        added = served.get_added_tokens_decoder()
        marks = {i for i, token in added.items() if token.special}
        tokens = served.get_vocab(with_added_tokens=False)
        self.symbols = np.array(sorted({*tokens.values()} - {*added}))
        used = [*self.symbols.tolist(), *({*added} - marks), bos or 0]
        if (
            not len(self.symbols)
            or not isinstance(vocab_size, int)
            or not max(used) < vocab_size <= MOST_TOKENS
        ):
            about = f"{len(self.symbols)} tokens that are text and ids up to {max(used)}"
            raise ValueError(f"it has {about}, the model {vocab_size} tokens")
        if bos is not None and bos not in marks:
            raise ValueError(f"its BOS {bos} is none of its special tokens")
        self.served, self.vocab_size, self.bos = served, vocab_size, bos
        decoder = json.dumps(json.loads(served.to_str())["decoder"], ensure_ascii=False)
        self._bytes = {i: _spelled(token, decoder) for token, i in tokens.items() if i not in added}
        self._bytes |= {i: token.content.encode() for i, token in added.items() if i not in marks}

    def encode(self, text: str) -> np.ndarray:
        """Ids, uint32. Marks in the text are text; half a surrogate pair, which is no text, becomes U+FFFD.

        Other threads go on meanwhile. Raises `UserError` for what the tokenizer does not know.
        """
        return np.array(self._encoding(text).ids, np.uint32)

    def spans(self, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The ids, and of each the places (begin, end) of its characters: none where it stands for none."""
        found = self._encoding(text)
        return np.array(found.ids, np.uint32), found.offsets

    def _encoding(self, text: str) -> Encoding:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            return _calm(lambda: self.served.encode(text, add_special_tokens=False))
        except ValueError as error:
            raise UserError(f"the tokenizer of the published model cannot encode the text: {error}") from None

    def decode(self, ids: Any) -> str:
        """Text, without marks; bytes that are no UTF-8 become U+FFFD."""
        return self.served.decode([int(i) for i in ids])

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes of the tokens, which may end within a character; ids that are no text have none.

        An encoding that puts a space in front of every text (SentencePiece's) shows it here.
        """
        return b"".join(self._bytes.get(int(i), b"") for i in ids)

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs."""
        about = {"kind": self.kind, "bos": self.bos is not None, "bos_id": self.bos}
        return {**about, "vocab_size": self.vocab_size, "tokenizer": json.loads(self.served.to_str())}


def from_json(saved: dict[str, Any]) -> PublishedTokenizer:
    """A tokenizer from a file that nobody vouches for: raises ValueError, TypeError or LookupError."""
    bos = saved["bos_id"] if saved["bos"] else None
    return PublishedTokenizer(_read(json.dumps(saved["tokenizer"])), saved["vocab_size"], bos)


def read_tokenizer(path: Path, bos: bool = True) -> PublishedTokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file; `bos` False leaves BOS out, where it has one.

    Raises `UserError` for a folder without one, and for one of another make, which it names.
    """
    try:
        served, vocab_size, first = _of_folder(path) if path.is_dir() else _of_gguf(path)
        return PublishedTokenizer(served, vocab_size, first if bos else None)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"cannot read the tokenizer of {path}: {reason}") from None


def by_pattern(pattern: str) -> PreTokenizer:
    """Cuts text into what matches, and that into bytes."""
    cut = Split(Regex(pattern), "isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_pairs(vocab: dict[str, int], merges: list[tuple[str, str]], whole: bool = False) -> Tokenizer:
    """A byte-level encoding that does not cut text; `whole`: pieces that are tokens are not merged first.

    Raises ValueError for merges of what is no token.
    """
    served = Tokenizer(_calm(lambda: models.BPE(vocab, merges, ignore_merges=whole)))
    served.decoder = decoders.ByteLevel()
    return served


def _of_folder(path: Path) -> tuple[Tokenizer, int, int | None]:
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    settings = {name: json.loads(_text(path / name)) for name in names if (path / name).exists()}
    if (path / "tokenizer.json").exists():
        served = _read(_text(path / "tokenizer.json"))
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        vocab, lines = json.loads(_text(path / "vocab.json")), _text(path / "merges.txt").split("\n")
        served = byte_pairs(vocab, _pairs(line for line in lines if line and not line.startswith("#version")))
        served.pre_tokenizer = PRE["gpt-2"]()
        served.add_special_tokens([BOS] if BOS in vocab else [])
    else:
        raise UserError(
            f"{path} has neither tokenizer.json nor vocab.json and merges.txt: save_pretrained of "
            "transformers.AutoTokenizer writes the first"
        )
    config = settings.get("config.json", {})
    name = next((found["bos_token"] for found in settings.values() if "bos_token" in found), "")
    name = name["content"] if isinstance(name, dict) else name
    bos = served.token_to_id(name) if name else config.get("bos_token_id")
    if name and bos is None:
        raise ValueError(f"its BOS {name!r} is no token")
    if name is None or not (name or bos in served.get_added_tokens_decoder()):
        bos = None  # it is said to have none, or the id is a default that nobody gave the tokenizer
    served.add_special_tokens([name] if name else [])
    return served, config.get("vocab_size") or max(served.get_vocab().values()) + 1, bos


def _of_gguf(path: Path) -> tuple[Tokenizer, int, int | None]:
    from configs.gguf_file import read_gguf

    fields = read_gguf(path).fields

    def field(name: str, default: Any = None) -> Any:
        return fields[name].contents() if name in fields else default

    model, pre = field("tokenizer.ggml.model", "none"), field("tokenizer.ggml.pre", "default")
    if pre == "default" and field("general.architecture") == "gpt2":
        pre = "gpt-2"
    if model != "gpt2" or pre not in PRE:
        possible = f"model gpt2 with pre {', '.join(PRE)}"
        asked = f"the tokenizer of {path} is of model {model}, pre {pre}"
        raise UserError(f"{asked}; {possible} can be read: give the Hugging Face folder")
    tokens = field("tokenizer.ggml.tokens", [])
    types = field("tokenizer.ggml.token_type", [1] * len(tokens))
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    served = byte_pairs(ids, _pairs(field("tokenizer.ggml.merges", [])), whole=pre == "llama-bpe")
    served.pre_tokenizer = PRE[pre]()
    bos = field("tokenizer.ggml.bos_token_id")
    served.add_special_tokens([token for token, i in ids.items() if types[i] == CONTROL or i == bos])
    served.add_tokens([token for token, i in ids.items() if types[i] == USER_DEFINED])
    return served, len(tokens), bos


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _pairs(lines: Iterable[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


def _read(content: str) -> Tokenizer:
    return _calm(lambda: Tokenizer.from_str(content))


def _calm(call: Callable[[], T]) -> T:
    """What `call` gives; a ValueError of one line for what the Rust code raises, or panics with."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ValueError(textwrap.shorten(str(error), 150, placeholder=" ...")) from None


def _spelled(token: str, decoder: str) -> bytes:
    """The bytes of a token, as `decoder` (in JSON) reads it."""
    if "ByteLevel" in decoder and {*token} <= BYTES.keys():
        return bytes(BYTES[letter] for letter in token)
    if "ByteFallback" in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return (token.replace("▁", " ") if "▁" in decoder else token).encode()
