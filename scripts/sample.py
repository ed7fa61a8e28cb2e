"""Go on from a prompt: each token of the model's text is shown as it is drawn."""

import codecs
import math
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from configs import UserError
from configs.cli import Parser, load_config
from configs.seeds import seed_for
from scripts import serve, warn

# At a terminal these are commands, and a model or a tokenizer may be anyone's.
CONTROLS = {i: f"\\x{i:02x}" for i in (*range(9), *range(11, 32), *range(127, 160))}


def main(argv: list[str]) -> None:
    """Serve one command line."""
    parser = Parser(prog="python -m scripts.sample", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="run folder")
    add("--prompt", default="", metavar="TEXT", help="text to go on from (default: none, begin with BOS)")
    add("--tokens", type=int, default=200, metavar="N", help="tokens to draw (default: 200)")
    add("--seed", type=int, default=1, metavar="S", help="same seed, same text (default: 1)")
    about = "of the softmax; 0: likeliest (default: 1)"
    add("--temperature", type=float, default=1.0, metavar="X", help=about)
    add("--top_k", type=int, metavar="K", help="draw from the K likeliest tokens (default: from all)")
    add("--top_p", type=float, metavar="P", help="then from the fewest that hold the share P (default: 1)")
    add("--checkpoint", type=int, metavar="STEP", help="weights of this step (default: the newest)")
    about = "full (default); none: slower, same text; window:W+N: roll over the last W and first N tokens"
    add("--cache", default="full", metavar="KIND", help=about)
    serve(parser, sample, argv, verbatim="--prompt")


def sample(asked: Namespace) -> None:
    """Print the prompt and what the model makes of it. Raises `UserError` for a wrong request."""
    possible = {
        "prompt": (asked.prompt == asked.prompt.encode(errors="ignore").decode(), "UTF-8"),
        "tokens": (asked.tokens >= 1, "1 or more"),
        "temperature": (0 <= asked.temperature < math.inf, "a number, 0 or above"),
        "top_k": (asked.top_k is None or asked.top_k >= 1, "1 or more"),
        "top_p": (asked.top_p is None or 0 < asked.top_p <= 1, "above 0 and at most 1"),
    }
    for name, (fine, values) in possible.items():
        if not fine:
            raise UserError(f"--{name} {getattr(asked, name)}: must be {values}")
    load_config(asked.run)  # refuses a folder that is no run ahead of the slow imports

    import torch

    from model.generate import generate
    from training.runs import load_run

    run = load_run(asked.run, asked.checkpoint)
    warn(run.faults)
    # A token at a time, turning the weights to bfloat16 costs more than it saves; and the cache is exact so.
    model, tokenizer = run.model.compute_in(torch.float32), run.tokenizer
    prompt, context_length = tokenizer.encode(asked.prompt).tolist(), model.config.context_length
    rolls = asked.cache.startswith("window")
    if len(prompt) + (tokenizer.bos is not None) > context_length and not rolls:
        read = f"the context is {context_length}, the last {context_length // 2} are read"
        warn([f"the prompt has {len(prompt)} tokens: {read}"])
    options: dict[str, Any] = {
        name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "cache")
    }
    options["bos"] = tokenizer.bos
    generator = torch.Generator().manual_seed(seed_for(asked.seed, "sample"))
    ids = generate(model, prompt, asked.tokens, generator=generator, **options)
    print(asked.prompt, end="", flush=True)
    # The decoder holds back the bytes of a character until it is whole.
    began = time.perf_counter()
    for text in codecs.iterdecode((tokenizer.decode_bytes([i]) for i in ids), "utf-8", "replace"):
        print(text.translate(CONTROLS if sys.stdout.isatty() else {}), end="", flush=True)
    rate = asked.tokens / (time.perf_counter() - began)
    print(flush=True)
    if sys.stderr.isatty():
        print(f"{asked.tokens} tokens, {rate:,.0f} a second", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
