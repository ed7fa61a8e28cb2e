"""Text in, batches out. Knows nothing of the model."""

from data.corpora import load_text
from data.sources import Batch, Repeats, Source, Text
from data.tokens import prepare
from data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

from configs.schema import Config

__all__ = ["Batch", "Repeats", "Source", "Text", "Tokenizer", "load_source", "load_tokenizer"]


def load_source(config: Config) -> Source:
    """The configured source of batches; raises `UserError` before anything is written."""
    data, T = config.data, config.model.context_length
    if data.source == "repeats":
        tokenizer = (
            CharTokenizer(Repeats.ALPHABET, data.bos) if data.tokenizer == "char" else ByteTokenizer(data.bos)
        )
        return Repeats(tokenizer, T, config.run.seed, config.global_batch)
    return Text(prepare(data, load_text(data), T), T, config.run.seed, config.global_batch)
