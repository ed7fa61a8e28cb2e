"""Tokenize the documents of `data.source hf` ahead of training, which does it otherwise as it starts.

`python -m scripts.prepare --config FILE [--data.key value ...]`: the options of train.py, but for `--resume`.
"""

import json
import sys

from configs import UserError
from configs.cli import parse_or_exit


def main(argv: list[str]) -> None:
    """Serve one command line."""
    try:
        prepare(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def prepare(argv: list[str]) -> None:
    """Print the folder and what it holds. Raises `UserError` for a wrong request."""
    request = parse_or_exit(argv)
    data = request.config.data
    if request.resume:
        raise UserError("--resume continues a run; a preparation goes on by itself where it stopped")
    if "hf" not in data.sources:
        raise UserError(f"data.source {data.source} needs no preparation; hf does")

    from data.preparation import prepared

    folder = prepared(data, request.config.model.context_length)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    print(folder)
    for name in ("train", "val"):
        part = meta[name]
        sizes = f"{part['documents']:>12,} documents {part['tokens']:>15,} tokens"
        print(f"  {name:5} {sizes}, {part['bytes'] / part['tokens']:.2f} bytes a token")
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in meta["skipped"].items())
    print(f"  vocabulary {meta['vocab_size']:,}; skipped {skipped or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
