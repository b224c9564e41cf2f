"""How confidences are to be read: the calibration that lies beside a drafter."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from dspark_jax.decoding.calibration_file import NAME, EstimatorName, read_calibration
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.interop.fingerprint import drafter_fingerprint


def add_estimator_argument(parser: argparse.ArgumentParser) -> None:
    """The flag --estimator."""
    parser.add_argument(
        "--estimator",
        choices=get_args(EstimatorName),
        help="what confidences are made of: the confidence head's logit, calibrated (sts), that and the draft's own "
        "probabilities (combined), or the head at its word (raw); by default what `dspark calibrate` chose",
    )


def load_estimator(
    name: EstimatorName | None, directory: Path, block_size: int, say: Callable[[str], None]
) -> Fitted | None:
    """The estimator of a drafter's directory; None where there is none, or the head alone is asked for.

    ValueError for a calibration that belongs to another drafter or is damaged, or where what is asked for is missing.
    """
    path = directory / NAME
    if name == "raw" or (name is None and not path.exists()):
        return None
    if not path.exists():
        raise ValueError(f"--estimator {name} needs {path}, which `dspark calibrate` writes; there is none")
    calibration = read_calibration(path, fingerprint=drafter_fingerprint(directory), block_size=block_size)
    fitted = calibration.estimator(name)
    measured = calibration.measured
    say(
        f"Confidences are calibrated ({name or calibration.use}, temperature {measured.temperature:g}, "
        f"{measured.rounds:,} rounds of {measured.prompts:,} prompts)."
    )
    return fitted
