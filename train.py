"""Train a drafter: python train.py --config tiny [--set optimizer.learning_rate=3e-4 ...] [--dry-run]"""

import argparse
import shlex
import sys
from pathlib import Path

from dspark_jax.training.config import find_config
from dspark_jax.training.dry_run import dry_run
from dspark_jax.training.hosts import add_flags, join
from dspark_jax.training.loop import Stopped, train
from dspark_jax.training.overrides import apply_overrides

CONFIGS = Path(__file__).parent / "configs"


def main() -> int | None:
    parser = argparse.ArgumentParser(description="Train a drafter for a frozen target. Run it again to resume.")
    parser.add_argument("--config", required=True, help="a name in configs/, or a path to a Python file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for example steps=100")
    parser.add_argument("--run-dir", type=Path, help="where the run lives (default: runs/<config>)")
    parser.add_argument("--fresh", action="store_true", help="delete what the run has written and start again")
    parser.add_argument("--dry-run", action="store_true", help="print sizes and sharding and run nothing")
    parser.add_argument("--topology", help="the machine of a dry run, for example v5e:8x8 or h200:8")
    add_flags(parser)
    flags = parser.parse_args()
    try:
        config = apply_overrides(find_config(flags.config, CONFIGS), flags.set)
        if flags.dry_run:
            return dry_run(config, flags.topology, print)
        join(flags)
        run_dir = flags.run_dir or Path("runs") / Path(flags.config).stem
        command = shlex.join(["python", *(argument for argument in sys.argv if argument != "--fresh")])
        outcome = train(config, run_dir, command=command, fresh=flags.fresh)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    # As a shell reports a process that a signal ended: `train && deploy` must not deploy half a run.
    return 128 + outcome.signal if isinstance(outcome, Stopped) else 0


if __name__ == "__main__":
    sys.exit(main())
