"""Asking for a configuration, and being refused one."""

from pathlib import Path
from typing import Any

import pytest

from configs import UserError
from configs.cli import parse
from configs.schema import Config

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
FIELDS = {
    f"{name}.{key}": field
    for name, section in Config.model_fields.items()
    for key, field in section.annotation.model_fields.items()
}


def config(*argv: str) -> Config:
    return parse(list(argv)).config


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(list(argv))
    return str(caught.value)


def value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)
