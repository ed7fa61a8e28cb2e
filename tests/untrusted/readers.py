"""Every file that is read, in folders that are whole: what reads each, and what is in it when it is good."""

import hashlib
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

from configs import UserError
from configs.cli import parse, to_yaml, validate
from data.hub import Corpus
from data.loading import load_source
from data.tokenizers import ByteTokenizer
from data.treebank import read_treebank
from model.interop import to_published
from scripts import report
from tests.analysis.made_up import evaluated, heads
from tests.data import stored
from tests.data.published_files import folder_of
from tests.model.models import build_random
from tests.model.test_published_files import small
from tests.runs.tiny import start
from training.checkpoints import FILES, load_newest
from training.optimizers import make_optimizers
from training.runs import SavedRun, load_published_run, load_run


class Reader:
    """What `read` makes of a folder, whose `files` (those of `names`) are good."""

    def __init__(self, folder: Path, names: list[str], read: Callable[[], object]):
        self.folder, self.read = folder, read
        self.files = {name: (folder / name).read_bytes() for name in names}
        self.read()  # as it is, it is read

    def refusal(self, name: str, content: bytes) -> str | None:
        """What it says to a folder with another file in it, None if it takes that; else what is raised."""
        path = self.folder / name
        path.write_bytes(content)
        sums = path.parent / "checksums.json"
        before = sums.read_bytes() if sums.exists() else b""
        if before and path != sums:  # who changes a file on purpose changes its checksum, too
            digests = {file: hashlib.sha256((path.parent / file).read_bytes()).hexdigest() for file in FILES}
            sums.write_text(json.dumps(digests))
        try:
            self.read()
        except UserError as error:
            return str(error)
        finally:
            path.write_bytes(self.files[name])
            if before:
                sums.write_bytes(before)
        return None


@contextmanager
def bounded(size: int) -> Iterator[None]:
    """No more than `size` bytes of memory beyond what this process has: more is a MemoryError, or its end."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_of(folder: Path) -> Path:
    """A run of three steps with one checkpoint."""
    small = {"checkpoint": {"every": 0, "keep_last": 1, "keep_best": False}, "train": {"steps": 3}}
    run = start(folder, eval={"every": 3}, probe={"every": 3}, **small)
    shutil.rmtree(run / "checkpoints" / "step-00000000", ignore_errors=True)
    return run


def run(folder: Path) -> Reader:
    made = run_of(folder)
    inner = [f"checkpoints/step-00000003/{name}" for name in (*FILES, "checksums.json")]
    return Reader(made, ["config.yaml", "tokenizer.json", *inner], lambda: used(load_run(made)))


def resumed(folder: Path) -> Reader:
    made = run_of(folder)
    model, config = load_run(made).model, parse(["--resume", str(made)]).config
    optimizers = make_optimizers(model, config.optimizer)

    def read() -> None:
        for optimizer in optimizers:
            optimizer.state.clear()
        load_newest(made / "checkpoints", model, optimizers)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()

    inner = [f"checkpoints/step-00000003/{name}" for name in (*FILES, "checksums.json")]
    return Reader(made, inner, read)


def drawn(folder: Path) -> Reader:
    made = run_of(folder)
    content = evaluated(heads(labels={(0, 1): ["sink"], (1, 1): ["induction"]}), steps=(0, 3))
    (made / "heads.json").write_text(json.dumps(content))
    words = report.PARSER.parse_args([str(made)])
    return Reader(made, ["metrics.jsonl", "heads.json"], lambda: report.main(words))


def used(found: SavedRun) -> None:
    ids = found.tokenizer.encode("0 is 0 and 0.\n")
    found.tokenizer.decode(ids)
    found.tokenizer.decode_bytes(range(found.tokenizer.vocab_size))


def huggingface(folder: Path) -> Reader:
    """With weights in two files, and their index."""
    config, tensors = to_published(build_random("grouped", mlp="swiglu", vocab_size=400))
    folder_of(folder, config=config | {"bos_token_id": None})
    names, where = sorted(tensors), {}
    for file, own in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in own}, folder / file)
        where |= dict.fromkeys(own, file)
    index = "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", index, "a.safetensors"]
    return Reader(folder, names, lambda: used(load_published_run(folder)))


def older(folder: Path) -> Reader:
    """As GPT-2 came: a tokenizer in two files."""
    config, tensors = to_published(build_random("gpt2", vocab_size=300))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    bytelevel = [*ByteLevel.alphabet(), "he", "the", "Ġthe"]
    vocab = {token: i for i, token in enumerate(sorted(bytelevel))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nt he\nĠ the\n")
    names = ["config.json", "vocab.json", "merges.txt", "model.safetensors"]
    return Reader(folder, names, lambda: used(load_published_run(folder)))


def gguf(folder: Path) -> Reader:
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "he"]
    path = small(folder / "model.gguf", tokens)
    return Reader(folder, [path.name], lambda: used(load_published_run(path)))


def treebank(folder: Path) -> Reader:
    source = Path(__file__).parents[1] / "data" / "treebank.conllu"
    shutil.copy(source, folder)
    return Reader(folder, [source.name], lambda: read_treebank(folder / source.name))


def prepared(folder: Path) -> Reader:
    """Tokens in two shards and documents of several lengths."""
    lengths = {"train": [30, 5, 60, 25], "val": [40, 20]}
    stored.write(folder, stored.streams(lengths, 256), 257, 256, shard=70)
    (folder / "tokenizer.json").write_text(json.dumps(ByteTokenizer(bos=True).to_json()))
    data = {"source": "hf", "path": str(folder), "tokenizer": "byte", "mask_documents": True}
    config = validate({"data": data, "model": {"context_length": 17}, "train": {"batch_size": 3}})

    def read() -> None:
        source = load_source(config)
        ids = [source.batch(step).inputs_BT for step in range(1, 5)]
        ids += [batch.inputs_BT for batch in source.validation(4, 0)]
        assert all(batch.min() >= 0 and batch.max() < source.tokenizer.vocab_size for batch in ids)
        source.probe_text(2, 17, True)

    names = [path.name for path in folder.iterdir()]
    return Reader(folder, names, read)


def documents(folder: Path) -> Reader:
    """Rows of JSON and of Parquet."""
    rows = [{"text": f"Row {i} is of {i} words.\n" * 3, "n": i} for i in range(20)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "more").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "more" / "a.parquet")

    def read() -> None:
        for path in (folder / "a.jsonl", folder / "more" / "a.parquet"):
            for piece, _ in Corpus(
                validate({"data": {"source": "hf", "path": str(path), "tokenizer": "byte"}}).data
            ):
                piece.text.encode()

    return Reader(folder, ["a.jsonl", "more/a.parquet"], read)


def configuration(folder: Path) -> Reader:
    (folder / "a.yaml").write_text(to_yaml(validate({"data": {"source": "repeats"}})))
    return Reader(folder, ["a.yaml"], lambda: parse(["--config", str(folder / "a.yaml")]))


READERS = [configuration, documents, drawn, gguf, huggingface, older, prepared, resumed, run, treebank]
