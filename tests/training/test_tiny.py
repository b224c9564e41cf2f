"""The run a newcomer starts first: the toy drafter learns to be accepted."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from dspark_jax.training.config import find_config
from dspark_jax.training.loop import train
from dspark_jax.training.report import read_report


@pytest.mark.slow
def test_the_accepted_length_of_the_toy_rises(tmp_path):
    config = find_config("tiny", Path(__file__).parents[2] / "configs")
    train(config, tmp_path, command="python train.py --config tiny", console=Console(file=io.StringIO()))
    lengths = [line["accepted_length_t1"] for line in read_report(tmp_path, "evaluation")]
    assert lengths[0] < 1.2
    assert lengths[-1] > 2.2
    assert lengths[0] < lengths[1] < lengths[2]
