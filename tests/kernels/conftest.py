"""Programs compiled for TPUs that are not there, in processes of their own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.training.compiler import ENVIRONMENT

PRELUDE = r"""
import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

MOVE = r"= \(?\w+\[([\d,]+)\][^=]* (?:copy|transpose|copy-start)\("
SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
described = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[sys.argv[1]])
device = SingleDeviceSharding(described.devices[0])


def shape(*dims, dtype=jnp.bfloat16, where=device):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=where)


def copied(compiled, dims):
    # Instructions that move a whole array of these dimensions, in whatever order.
    moves = re.findall(MOVE, compiled.as_text())
    return [found for found in moves if sorted(map(int, found.split(","))) == sorted(dims)]


def report(**facts):
    print(json.dumps(facts))
"""


@pytest.fixture(scope="session")
def ahead():
    """ahead(kind, script): what the script reports, a list of dicts; skipped without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'dspark-jax[tpu]'")
    environment = os.environ | ENVIRONMENT
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)

    def run(kind, script):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + script, kind],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run
