"""Tokenize the documents of `data.source hf` ahead of training, which does it otherwise as it starts.

`python -m scripts.prepare --config FILE [--data.key value ...]`: options of train.py.
"""

import sys

from configs import UserError
from configs.cli import parse_or_exit
from scripts import exits


def main(argv: list[str]) -> None:
    """Print the folder and what it holds."""
    request = parse_or_exit(argv)
    config, data = request.config, request.config.data
    if request.resume or request.dry_run or config.model.init_from:
        raise UserError("--resume, --dry_run and --model.init_from are of train.py; a preparation has none")
    if "hf" not in data.sources:
        raise UserError(f"data.source {data.source} needs no preparation; hf does")

    from data.preparation import prepared
    from data.store import read_meta

    folder = prepared(data, config.model.context_length)
    meta = read_meta(folder)
    print(folder)
    for name, part in (("train", meta.train), ("val", meta.val)):
        sizes = f"{part.documents:>12,} documents {part.tokens:>15,} tokens"
        print(f"  {name:5} {sizes}, {part.bytes / part.tokens:.2f} bytes a token")
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in meta.skipped.items())
    print(f"  vocabulary {meta.vocab_size:,}; skipped {skipped or 'none'}")


if __name__ == "__main__":
    with exits():
        main(sys.argv[1:])
