"""Command line and YAML to one validated `Config`; every problem in one message, with the nearest key."""

import argparse
import difflib
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from configs import UserError
from configs.files import refuse_large
from configs.ranks import is_first, processes
from configs.schema import Config, Stage
from configs.screen import foreign, show_anything, shown

SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
KNOWN = [*KEYS, *SECTIONS, "config", "resume", "print_config", "dry_run"]
PLAIN = {  # what pydantic would say in terms of Python
    "missing": "is missing",
    "model_type": "must have keys with values",
    "dict_type": "must have keys with values",
    "list_type": "must be a list",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
MOST_BYTES, MOST_NODES, MOST_TOLD = 2**17, 10_000, 50  # of a configuration in a file; problems told

# What weights, moments and data order hang on: a resumed run keeps these as they were.
FIXED = {key for key in KEYS if key.startswith(("model.", "data."))} | {"run.seed", "optimizer.name"}
FIXED -= {"model.backend", "model.dropout", "data.path", "data.cache_dir", "data.streaming"}


class Request(NamedTuple):
    """What the command line asked for; `resume` is the run folder to continue."""

    config: Config
    resume: Path | None
    print_config: bool = False
    dry_run: bool = False


class Parser(argparse.ArgumentParser):
    """Complains with `UserError`: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UserError(f"{message}; see --help")


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML would take the last of two equal keys without a word."""

    def get_single_node(self) -> yaml.Node | None:
        """Aliases make a few lines stand for more than any memory holds, or for something without end."""
        root = super().get_single_node()
        parts, count = [root], 0
        while parts:
            value = getattr(parts.pop(), "value", None)
            inner = value if isinstance(value, list) else []  # of nodes, or of pairs of them
            parts += [part for each in inner for part in (each if isinstance(each, tuple) else [each])]
            if (count := count + 1 + len(inner)) > MOST_NODES:
                raise yaml.YAMLError(f"it stands for more than {MOST_NODES:,} values")
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]  # before `<<` adds what it takes over
        if len({*map(str, keys)}) < len(keys):
            raise yaml.YAMLError(f"a key stands twice {node.start_mark}")
        return super().construct_mapping(node, deep)


class _Settings(Config, BaseSettings):
    model_config = SettingsConfigDict(cli_parse_none_str="null", cli_avoid_json=True)


def parse(argv: list[str]) -> Request:
    """Merge defaults < YAML file (`--config`, or the run's own with `--resume`) < command line, and validate.

    Raises `UserError` that lists every unknown key and every invalid value.
    """
    for name in SECTIONS:
        if any(word.split("=")[0] == f"--{name}" for word in argv):
            raise UserError(f"{name} is a section: give single keys, as in --{name}.key value")
    parser = _parser()
    source: Any = CliSettingsSource(_Settings, root_parser=parser)
    arguments, unknown = parser.parse_known_args(argv)
    try:
        given = source(parsed_args=arguments)()
    except SettingsError:
        raise UserError("--data.stages is not JSON: see its form in --help") from None
    given = {name: given[name] for name in SECTIONS if name in given}
    if arguments.config is not None and arguments.resume is not None:
        raise UserError("give --config to start a run or --resume to continue one, not both")
    values: dict[str, Any] = {}
    if arguments.config is not None:
        missing = f"no config file {arguments.config}; configs/ has {', '.join(presets())}"
        values = read_yaml(Path(arguments.config), missing)
    if arguments.resume is None:
        config = validate(_merge(values, given), unknown)
        config.train._fill("ranks", processes())
        if not (arguments.dry_run or arguments.print_config):
            _refuse_other_ranks(config)
        return Request(config, None, arguments.print_config, arguments.dry_run)
    folder = Path(arguments.resume)
    return Request(_resumed(folder, given, unknown), folder, arguments.print_config, arguments.dry_run)


def _resumed(folder: Path, given: dict[str, Any], unknown: list[str]) -> Config:
    """What a run was asked for, and is now; refuses what would make it another run."""
    missing = f"--resume needs a run folder, with config and checkpoints; {folder} has no config.yaml"
    saved = read_yaml(folder / "config.yaml", missing)
    if misplaced := {"dir", "overwrite"} & {*given.get("run", {})}:
        raise UserError(f"--resume goes on in {folder}: leave out --run.{misplaced.pop()}")
    # It may have been moved, or go on with more processes or fewer.
    here = _merge(saved, {"run": {"dir": str(folder)}, "train": {"ranks": processes()}})
    config = validate(_merge(here, given), unknown)
    _refuse_other_ranks(config)
    then = validate(saved)
    if then.global_batch != config.global_batch:
        keep = _as_large(then.global_batch, config.train.batch_size)
        sizes = f"{then.global_batch} sequences, here it would have {config.global_batch}"
        raise UserError(f"a step of this run has {sizes}: {keep}")
    was, asked = flat(then), flat(config)
    changed = [f"{k} (was {shown(was[k])}, asked {shown(asked[k])})" for k in KEYS if was[k] != asked[k]]
    if refused := [change for change in changed if change.split()[0] in FIXED]:
        raise UserError(f"a resumed run keeps {', '.join(refused)}; start a new run to change that")
    return config


def parse_or_exit(argv: list[str]) -> Request:
    """`parse`, with `--print_config` served and errors shown: one message, no traceback, exit code 2."""
    show_anything()
    try:
        if not argv:
            start = f"--config FILE (configs/ has {', '.join(presets())})"
            raise UserError(f"give {start} to start a run or --resume DIR to go on with one; --help has more")
        request = parse(argv)
    except UserError as error:
        if not is_first():
            time.sleep(5)  # the first rank tells the same, and then torchrun ends this one
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if request.print_config:
        print(to_yaml(request.config) if is_first() else "", end="")
        sys.exit(0)
    return request


def validate(values: dict[str, Any], unknown: list[str] | None = None) -> Config:
    """`values` as a `Config`; `unknown` command-line words are reported together with the other problems."""
    words = unknown or []
    problems = [_unknown_key(word[2:].split("=")[0]) for word in words if word.startswith("--")]
    problems += [] if problems else [f"unexpected argument {word!r}" for word in words]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += [_describe(detail) for detail in error.errors()[:MOST_TOLD]]
    if problems:
        head = "" if len(problems) == 1 else f"{len(problems)} problems in the configuration:\n  "
        raise UserError(head + "\n  ".join(problems))
    return config


def read_yaml(path: Path, missing: str) -> dict[str, Any]:
    """The sections of a YAML file; `UserError` with the place for anything else."""
    try:
        refuse_large(path, MOST_BYTES)
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}  # a SafeLoader
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(missing) from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(keys or {}, dict) for keys in values.values()):
        raise UserError(f"{path} must hold sections with keys, such as 'train:' and below it '  steps: 100'")
    return {name: keys or {} for name, keys in values.items()}


def load_config(folder: Path) -> Config:
    """The configuration of a run. Raises `UserError` where the folder is no run."""
    if str(folder) != str(folder).encode(errors="ignore").decode():
        raise UserError(f"{str(folder)!r} is no name in UTF-8: rename the folder")
    return validate(read_yaml(folder / "config.yaml", f"{folder} is no run folder: it has no config.yaml"))


def presets() -> list[str]:
    """Names of the preset files in configs/."""
    return sorted(path.name for path in Path(__file__).parent.glob("*.yaml"))


def to_yaml(config: Config) -> str:
    """The complete, resolved configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def _parser() -> argparse.ArgumentParser:
    about = "Train a small GPT and record what its attention heads do. --section.key overrides the file."
    parser = Parser(prog="train.py", description=about, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file; configs/ has {', '.join(presets())}")
    parser.add_argument("--resume", metavar="DIR", help="run folder to continue, from its newest checkpoint")
    parser.add_argument("--print_config", action="store_true", help="print the merged configuration and stop")
    about = "print the size of the run, its FLOPs and the memory it needs, and stop; writes nothing"
    parser.add_argument("--dry_run", action="store_true", help=about)
    return parser


def _refuse_other_ranks(config: Config) -> None:
    started, asked = processes(), config.train.ranks
    if asked != started:
        way = f"torchrun --standalone --nproc-per-node {asked} train.py ... starts them"
        start = f"{asked} processes, not the {started} here: {way}"
        if asked == 1:
            start = f"one process, not the {started} here: start it without torchrun"
        keep = _as_large(config.global_batch, config.train.batch_size)
        raise UserError(f"train.ranks {asked} is {start}; {keep}")


def _as_large(size: int, batch_size: int) -> str:
    """What to ask for, with the processes that there are, so that a step has `size` sequences."""
    ranks = processes()
    if size % ranks:
        return f"{ranks} cannot share its {size} sequences a step"
    batch_size = math.gcd(size // ranks, batch_size)
    keys = {"ranks": ranks, "batch_size": batch_size, "grad_accum": size // ranks // batch_size}
    return f"{' '.join(f'--train.{key} {value}' for key, value in keys.items())} keeps the batch"


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    return {name: {**below.get(name, {}), **above.get(name, {})} for name in {**below, **above}}


def flat(config: Config) -> dict[str, Any]:
    """All values by `section.key`."""
    return {f"{name}.{key}": v for name, keys in config.model_dump().items() for key, v in keys.items()}


def _unknown_key(key: str, known: list[str] = KNOWN) -> str:
    key = foreign(key)
    same_leaf = [full for full in KEYS if full.split(".")[1] == key.split(".")[-1] and full in known]
    near = same_leaf or difflib.get_close_matches(key, known, 1, 0.5)
    return f"{key}: no such key" + (f"; nearest: {near[0]}" if near else "; --help lists all keys")


def _describe(detail: Any) -> str:
    place = [str(part) for part in detail["loc"]]
    key = ".".join(place[:-2] if place[-1:] == ["[key]"] else place)  # a key of `weights` that is no source
    if detail["type"] == "extra_forbidden":
        stage = [f"{'.'.join(place[:-1])}.{name}" for name in Stage.model_fields]
        return _unknown_key(key, stage if len(place) > 2 else KNOWN)
    message = PLAIN.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] == "value_error":  # a cross-check of ours, which names the keys itself
        return f"{key}: {message}" if key else message
    value = detail["input"]
    got = shown(value) if value is None or isinstance(value, bool) else foreign(repr(value), 200)
    return f"{key}: {message[0].lower()}{message[1:]}; got {got}"
