"""Text in, batches out. Knows nothing of the model."""

import torch

from configs.schema import TEXTS, Config
from data.corpora import load_text
from data.mixture import Mixture, Source
from data.sources import Text
from data.synthetic import Backcopy, Repeats
from data.tokenizers import ALPHABET, Tokenizer, make_tokenizer
from data.tokens import prepare

SYNTHETIC = {source.name: source for source in (Repeats, Backcopy)}


def load_source(config: Config, tokenizer: Tokenizer | None = None) -> Mixture:
    """The configured batches; raises `UserError` before anything is written.

    One tokenizer serves all sources; without one given it is made from the data. Synthetic ones draw from the
    symbols that occur in the text, if any.
    """
    data, T, seed = config.data, config.model.context_length, config.run.seed
    texts = {name: load_text(name, data.path) for name in data.sources if name in TEXTS}
    characters = "".join(sorted({*"".join(texts.values())})) if texts else ALPHABET
    tokenizer = tokenizer or make_tokenizer(data.tokenizer, data.bos, characters)
    sources: dict[str, Source] = {
        name: Text(prepare(data, name, text, tokenizer, T), T, seed) for name, text in texts.items()
    }
    read = [source.symbols for source in sources.values()]
    symbols = torch.cat(read).unique() if read else torch.arange(tokenizer.vocab_size - data.bos)
    for name in data.sources:
        if name not in texts:
            sources[name] = SYNTHETIC[name](symbols, tokenizer.bos, T, seed)
    return Mixture(
        tokenizer, {name: sources[name] for name in data.sources}, data.stages, config.global_batch
    )
