"""Repeat the step at which a run met a number that is not finite, and show where such numbers come up."""

import sys
from argparse import Namespace
from pathlib import Path

from configs.cli import Parser, load_config
from configs.screen import foreign
from scripts import exits

PARSER = Parser(prog="python -m scripts.replay", description=__doc__, allow_abbrev=False)
PARSER.add_argument("run", type=Path, metavar="RUN", help="run folder")
about = "of the linear layers (default: that of the run); fp32 shows whether it is the precision"
PARSER.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help=about)


def main(given: Namespace) -> None:
    """Print a line for each tensor in forward order, then the gradients, and mark the first that is bad."""
    load_config(given.run)  # refuses a folder that is no run ahead of the slow imports

    from training.failed import replay

    about, found = replay(given.run, given.precision)
    print(f"{about['path']}: it stopped at {foreign(about['culprit'], 200)}\n")
    width = max(map(len, found))
    print(f"  {'in ' + about['precision']:{width}}  largest finite  not finite")
    for name, (largest, nonfinite) in found.items():
        mark = ">" if name == about["first"] else " "
        print(f"{mark} {name:{width}}  {largest:14.4g}  {nonfinite:10,}")
    print(f"\nfirst that is not finite: {about['first'] or 'none, this time'}")


if __name__ == "__main__":
    with exits():
        main(PARSER.parse_args(sys.argv[1:]))
