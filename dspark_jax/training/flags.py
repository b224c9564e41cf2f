"""The command line of train.py."""

import argparse
from pathlib import Path

from dspark_jax.training.compile_ahead import LEVELS
from dspark_jax.training.hosts import add_flags


def read_flags() -> argparse.Namespace:
    """What was typed; argparse explains what does not parse."""
    parser = argparse.ArgumentParser(description="Train a drafter for a frozen target. Run it again to resume.")
    parser.add_argument("--config", required=True, help="a name in configs/, or a path to a Python file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for example steps=100")
    parser.add_argument("--run-dir", type=Path, help="where the run lives (default: runs/<config>)")
    parser.add_argument("--fresh", action="store_true", help="delete what the run has written and start again")
    parser.add_argument("--dry-run", action="store_true", help="print sizes and sharding and run nothing")
    parser.add_argument(
        "--topology",
        metavar="KIND:CHIPS",
        help="train nothing, compile a step for that TPU slice, for example v5e:8x8, and say what it would take there "
        "(with --dry-run: the machine that it describes, h200:8 too)",
    )
    parser.add_argument("--optimization", choices=LEVELS, help="XLA's effort with --topology; O1 takes a fraction")
    add_flags(parser)
    return parser.parse_args()
