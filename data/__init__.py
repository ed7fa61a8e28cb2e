"""Text in, batches out. Knows nothing of the model."""

from typing import TYPE_CHECKING

from configs import UserError
from configs.schema import TEXTS, Config

if TYPE_CHECKING:
    from data.mixture import Mixture, Source
    from data.tokenizers import Tokenizer


def load_source(config: Config, tokenizer: "Tokenizer | None" = None) -> "Mixture":
    """The configured batches; raises `UserError` before anything is written.

    One tokenizer serves all sources: a new one, or `tokenizer`, with which a model that goes on was trained;
    it must be of the configured kind. Synthetic sources draw from the symbols that occur in the text, if any.
    """
    import torch  # here, so that preparing data goes without

    from data.corpora import load_text
    from data.mixture import Mixture
    from data.sources import Text
    from data.synthetic import Backcopy, Repeats
    from data.tokenizers import make_tokenizer, vocab_size_of
    from data.tokens import prepare

    synthetic = {source.name: source for source in (Repeats, Backcopy)}
    data, T, seed = config.data, config.model.context_length, config.run.seed
    texts = {name: load_text(name, data.path) for name in data.sources if name in TEXTS}
    if tokenizer is None:
        tokenizer = make_tokenizer(data, list(texts.values()))
    size, has_bos = tokenizer.vocab_size, tokenizer.bos is not None
    if (tokenizer.kind, has_bos) != (data.tokenizer, data.bos) or vocab_size_of(data) not in (None, size):
        given = f"data.tokenizer {tokenizer.kind}, data.bos {str(has_bos).lower()}, {size} tokens"
        raise UserError(f"the tokenizer to go on with has {given}: set the keys of data to that")
    sources: dict[str, Source] = {
        name: Text(prepare(data, name, text, tokenizer, T), T, seed) for name, text in texts.items()
    }
    read = [source.symbols for source in sources.values()]
    symbols = torch.cat(read).unique() if read else torch.from_numpy(tokenizer.symbols)
    for name in data.sources:
        if name not in texts:
            sources[name] = synthetic[name](symbols, tokenizer.bos, T, seed)
    return Mixture(
        tokenizer, {name: sources[name] for name in data.sources}, data.stages, config.global_batch
    )
