"""From a configuration to its batches."""

import torch

from configs import UserError
from configs.schema import WHOLE, Config
from configs.schema import Data as DataConfig
from data.corpora import load_text
from data.documents import Documents
from data.mixture import Mixture, Source
from data.preparation import prepared, prepared_text
from data.store import damaged
from data.synthetic import Backcopy, Repeats
from data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer, vocab_size_of

SYNTHETIC = {source.name: source for source in (Repeats, Backcopy)}


def load_source(config: Config, tokenizer: Tokenizer | None = None) -> Mixture:
    """The configured batches; raises `UserError` before anything is written.

    One tokenizer serves all sources: a new one, or `tokenizer`, with which a model that goes on was trained;
    it must be of the configured kind. Synthetic sources draw from the symbols that occur in the text, if any.
    """
    data, T, seed = config.data, config.model.context_length, config.run.seed
    if tokenizer is not None:
        refuse_other(tokenizer, data)
    sources: dict[str, Source] = {}
    if "hf" in data.sources:
        folder = prepared(data, T, tokenizer)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        refuse_other(tokenizer, data)
        sources["hf"] = documents = Documents(folder, data, T, seed)
        if (documents.vocab_size, documents.bos) != (tokenizer.vocab_size, tokenizer.bos):
            raise damaged(folder / "meta.json", "its vocab_size or bos is not that of tokenizer.json")
    texts = {name: load_text(name, data.path) for name in data.sources if name in WHOLE}
    tokenizer = tokenizer or make_tokenizer(data, list(texts.values()))
    for name, text in texts.items():
        own = data.model_copy(update={"source": name})
        sources[name] = Documents(prepared_text(own, T, text, tokenizer), own, T, seed)
    read = [source.symbols for source in sources.values()]
    symbols = torch.cat(read).unique() if read else torch.from_numpy(tokenizer.symbols)
    for name in data.sources:
        if name not in sources:
            sources[name] = SYNTHETIC[name](symbols, tokenizer.bos, T, seed)
    in_order = {name: sources[name] for name in data.sources}
    return Mixture(tokenizer, in_order, data.stages, config.global_batch)


def refuse_other(tokenizer: Tokenizer, data: DataConfig) -> None:
    """Raises `UserError` where `data` asks for another tokenizer."""
    size, has_bos = tokenizer.vocab_size, tokenizer.bos is not None
    if (tokenizer.kind, has_bos) != (data.tokenizer, data.bos) or vocab_size_of(data) not in (None, size):
        given = f"data.tokenizer {tokenizer.kind}, data.bos {str(has_bos).lower()}, {size} tokens"
        raise UserError(f"the tokenizer to go on with has {given}: set the keys of data to that")
