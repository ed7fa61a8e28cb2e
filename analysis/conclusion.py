"""What a run has come to: `heads.json` and `report.html`."""

import json
from pathlib import Path
from typing import Any

from analysis import report, table
from analysis.heads import describe_heads, in_words
from analysis.probes import Probes
from analysis.view import view
from configs.files import replace_text
from configs.schema import Config
from data.tokenizers import Tokenizer
from model.transformer import GPT


def conclude(
    folder: Path,
    config: Config,
    step: int,
    records: list[dict[str, Any]],
    model: GPT,
    probes: Probes | None,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Write both into the run folder, of the model after `step`; the rows of a table of its heads.

    Without probes there is nothing to say of heads: no `heads.json`, no rows.
    """
    heads = None
    if probes is not None:
        print("labelling the heads and writing the page", flush=True)
        about = {"run": folder.name, "step": step}
        heads = describe_heads(model, probes, config.data.bos, config.run.seed, about)
        replace_text(folder / "heads.json", json.dumps(heads, allow_nan=False))
        print(in_words(heads))
    shown = view(folder.name, config, records, heads, model, tokenizer)
    replace_text(folder / "report.html", report.page([shown]))
    return table.rows_of(heads) if heads else []
