"""Text in, batches out. Knows nothing of the model."""

from configs.schema import Config
from data.corpora import load_text
from data.sources import Repeats, Source, Text
from data.tokenizers import make_tokenizer
from data.tokens import prepare


def load_source(config: Config) -> Source:
    """The configured source of batches; raises `UserError` before anything is written."""
    data, T, seed = config.data, config.model.context_length, config.run.seed
    if data.source != "repeats":
        return Text(prepare(data, load_text(data), T), T, seed, config.global_batch)
    return Repeats(make_tokenizer(data.tokenizer, data.bos, Repeats.ALPHABET), T, seed, config.global_batch)
