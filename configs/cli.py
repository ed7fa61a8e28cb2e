"""Command line and YAML to one validated `Config`; every problem in one message, with the nearest existing key."""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from configs import UserError
from configs.schema import Config

KEYS = [
    f"{name}.{key}" for name, field in Config.model_fields.items() for key in field.annotation.model_fields
]  # type: ignore[union-attr]


class Request(NamedTuple):
    """What the command line asked for."""

    config: Config
    resume: Path | None
    print_config: bool = False


class _Settings(Config, BaseSettings):
    model_config = SettingsConfigDict(
        cli_parse_none_str="null", cli_avoid_json=True, cli_implicit_flags=False
    )


def parse(argv: list[str]) -> Request:
    """Merge defaults < YAML file (`--config`, or the run's own with `--resume`) < command line, and validate.

    Raises `UserError` that lists every unknown key and every invalid value.
    """
    parser = _parser()
    source: CliSettingsSource = CliSettingsSource(_Settings, root_parser=parser)
    arguments, unknown = parser.parse_known_args(argv)
    # Only what was given: a default left in would override the file.
    flags = {key: getattr(arguments, key) for key in ("config", "resume", "print_config")}
    given = source(parsed_args=arguments).__call__()
    if flags["config"] and flags["resume"]:
        raise UserError("give --config to start a run or --resume to continue one, not both")
    folder = Path(flags["resume"]) if flags["resume"] else None
    values, saved = {}, None
    if folder is not None:
        saved = read_yaml(folder / "config.yaml", f"--resume needs a run folder; {folder} has no config.yaml")
        values = {
            **saved,
            "run": {**saved.get("run", {}), "dir": str(folder)},
        }  # it may have been moved since
    elif flags["config"]:
        values = read_yaml(
            Path(flags["config"]), f"no config file {flags['config']}; configs/ has {', '.join(presets())}"
        )
    given = {name: section for name, section in given.items() if name in Config.model_fields}
    for name, section in given.items():
        values[name] = {**(values.get(name) or {}), **section}
    config = validate(values, unknown)
    if saved is not None:
        _check_resumable(validate(saved), config)
    return Request(config, folder, flags["print_config"])


def parse_or_exit(argv: list[str]) -> Request:
    """`parse`, with `--print_config` served and errors shown: exit code 2, one message, no traceback."""
    try:
        request = parse(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if request.print_config:
        print(to_yaml(request.config), end="")
        sys.exit(0)
    return request


def validate(values: dict[str, Any], unknown: list[str] = ()) -> Config:  # type: ignore[assignment]
    """`values` as a `Config`; `unknown` are left-over command-line words, reported with the other problems."""
    problems = [
        _unknown_key(word.removeprefix("--").split("=")[0]) for word in unknown if word.startswith("--")
    ]
    problems += [] if problems else [f"unexpected argument {word!r}" for word in unknown]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += [_describe(detail) for detail in error.errors()]
    if problems:
        head = "" if len(problems) == 1 else f"{len(problems)} problems in the configuration:\n  "
        raise UserError(head + "\n  ".join(problems))
    return config


def read_yaml(path: Path, missing: str) -> dict[str, Any]:
    """The mapping in a YAML file; one line with the place for anything else."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(missing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values or {}, dict) or not all(
        isinstance(v or {}, dict) for v in (values or {}).values()
    ):
        raise UserError(f"{path} must hold sections with keys, such as 'train:' and below it '  steps: 100'")
    return {name: section or {} for name, section in (values or {}).items()}


def presets() -> list[str]:
    """Names of the preset files in configs/."""
    return sorted(path.name for path in Path(__file__).parent.glob("*.yaml"))


def to_yaml(config: Config) -> str:
    """The complete, resolved configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a small GPT and record what its attention heads do. --section.key value overrides the file.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"preset or own YAML file; configs/ has {', '.join(presets())}"
    )
    parser.add_argument(
        "--resume", metavar="DIR", help="continue the run in DIR from its newest intact checkpoint"
    )
    parser.add_argument("--print_config", action="store_true", help="print the merged configuration and stop")
    return parser


def _check_resumable(before: Config, after: Config) -> None:
    """What weights, moments and data order hang on stays as it was when the run began."""
    old, new = before.model_dump(), after.model_dump()
    changed = [key for key in KEYS if _is_fixed(key) and _get(old, key) != _get(new, key)]
    if changed:
        listed = ", ".join(f"{key} (was {_get(old, key)}, asked {_get(new, key)})" for key in changed)
        raise UserError(f"a resumed run keeps {listed}; start a new run to change that")


def _is_fixed(key: str) -> bool:
    if key.startswith("model."):
        return key not in ("model.backend", "model.dropout")
    return key in (
        "run.seed",
        "data.source",
        "data.tokenizer",
        "data.bos",
        "data.val_fraction",
        "optimizer.name",
    )


def _get(values: dict[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return values[section][name]


def _unknown_key(key: str) -> str:
    by_leaf = [full for full in KEYS if full.split(".")[1] == key.split(".")[-1]]
    near = by_leaf or difflib.get_close_matches(
        key, [*KEYS, "config", "resume", "print_config"], n=1, cutoff=0.5
    )
    return f"{key}: no such key" + (f"; nearest: {near[0]}" if near else "; --help lists all keys")


def _describe(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key)
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if detail["type"] == "value_error":  # a cross-check of ours, which names the keys itself
        return f"{key}: {message}"
    return f"{key}: {message}; got {detail['input']!r}"
