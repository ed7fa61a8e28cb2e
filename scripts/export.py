"""A run as a Hugging Face folder, which `transformers` loads: weights, configuration, tokenizer."""

import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from configs import UserError
from configs.cli import Parser, load_config
from scripts import exits, warn

PARSER = Parser(prog="python -m scripts.export", description=__doc__, allow_abbrev=False)
PARSER.add_argument("run", type=Path, help="run folder")
PARSER.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
about = "weights of this step (default: the newest)"
PARSER.add_argument("--checkpoint", type=int, metavar="STEP", help=about)


def main(asked: Namespace) -> None:
    """Write the folder, complete or not at all, and print how it is loaded."""
    out = asked.out.resolve()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):  # not so a name that is too long
        raise UserError(f"--out {asked.out} is there already, and no empty folder: name another")
    load_config(asked.run)  # refuses a folder that is no run ahead of the slow imports

    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from data import exported
    from model import interop
    from training.runs import load_run

    run = load_run(asked.run, asked.checkpoint)
    warn(run.faults)
    config, tensors = interop.to_published(run.model)
    marks = {"bos_token_id": run.tokenizer.bos, "eos_token_id": exported.eos_of(run.tokenizer)}
    files = {"config.json": config | marks, "generation_config.json": marks}
    files |= exported.to_published(run.tokenizer)
    files["tokenizer_config.json"]["model_max_length"] = run.config.model.context_length
    temporary = out.with_name(f"tmp-{out.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {asked.out}: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"step {run.step} of {asked.run} as {config['architectures'][0]}; to load it:")
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        print(f"  transformers.{name}.from_pretrained({str(asked.out)!r})")


if __name__ == "__main__":
    with exits():
        main(PARSER.parse_args(sys.argv[1:]))
