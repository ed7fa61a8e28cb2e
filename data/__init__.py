"""Text in, batches out. Knows nothing of the model."""

import torch

from configs.schema import TEXTS, Config
from data.corpora import load_text
from data.documents import Documents
from data.mixture import Mixture, Source
from data.sources import Text
from data.synthetic import ALPHABET, Backcopy, Repeats
from data.tokenizers import load_tokenizer, make_tokenizer
from data.tokens import prepare

SYNTHETIC = {source.name: source for source in (Repeats, Backcopy)}


def load_source(config: Config) -> Mixture:
    """The configured batches; raises `UserError` before anything is written.

    One tokenizer serves all sources. Synthetic ones draw from the symbols that occur in the text, if any.
    """
    data, T, seed = config.data, config.model.context_length, config.run.seed
    texts = {name: load_text(name, data.path) for name in data.sources if name in TEXTS}
    characters = "".join(sorted({*"".join(texts.values())})) if texts else ALPHABET
    tokenizer = make_tokenizer(data.tokenizer, data.bos, characters)
    sources: dict[str, Source] = {
        name: Text(prepare(data, name, text, tokenizer, T), T, seed) for name, text in texts.items()
    }
    if "hf" in data.sources:
        from data.preparation import prepared  # here, for `datasets` takes a second to import

        folder = prepared(data)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        sources["hf"] = Documents(folder, data, T, seed)
    read = [source.symbols for source in sources.values()]
    symbols = torch.cat(read).unique() if read else torch.arange(tokenizer.vocab_size - data.bos)
    for name in data.sources:
        if name not in sources:
            sources[name] = SYNTHETIC[name](symbols, tokenizer.bos, T, seed)
    return Mixture(
        tokenizer, {name: sources[name] for name in data.sources}, data.stages, config.global_batch
    )
