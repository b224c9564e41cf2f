"""Train a drafter: python train.py --config tiny [--set optimizer.learning_rate=3e-4 ...] [--dry-run]"""

import shlex
import sys
from pathlib import Path

from dspark_jax.core.logs import print_once
from dspark_jax.core.signals import interruptible
from dspark_jax.training.compile_ahead import compile_ahead
from dspark_jax.training.config import find_config
from dspark_jax.training.dry_run import dry_run
from dspark_jax.training.flags import read_flags
from dspark_jax.training.hosts import join
from dspark_jax.training.loop import Stopped, train
from dspark_jax.training.overrides import apply_overrides


def main() -> int | None:
    print_once()
    flags = read_flags()
    try:
        config = apply_overrides(find_config(flags.config, Path(__file__).parent / "configs"), flags.set)
        if flags.dry_run:
            return dry_run(config, flags.topology, print)
        if flags.topology:
            return compile_ahead(config, flags.topology, flags.optimization, print)
        join(flags)
        command = shlex.join(["python", *(argument for argument in sys.argv if argument != "--fresh")])
        run_dir = flags.run_dir or Path("runs") / Path(flags.config).stem
        outcome = train(config, run_dir, command=command, fresh=flags.fresh)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    # As a shell reports a process that a signal ended: `train && deploy` must not deploy half a run.
    return 128 + outcome.signal if isinstance(outcome, Stopped) else 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
