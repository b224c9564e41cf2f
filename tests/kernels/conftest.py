"""Programs compiled for TPUs that are not there, and run on simulated devices, in processes of their own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.training.compiler import ENVIRONMENT

AHEAD = r"""
import json
import re
import sys
from functools import partial
from itertools import product

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


def report(compiled, dims, **facts):
    facts |= {
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "copied": copied(compiled, dims),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }
    print(json.dumps(facts))
"""

SIMULATED = """
import jax

jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.mesh import make_mesh

rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
mesh = make_mesh(tensor=2)
assert mesh.devices.shape == (2, 1, 2)
"""


@pytest.fixture(params=["v5e", "tpu7x", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("v4", "v5p", "v6e"))])
def kind(request):
    """A generation of TPUs; the ordinary run compiles for an old and a new one."""
    return request.param


@pytest.fixture(scope="session")
def ahead():
    """ahead(kind, script): what the script reports, a list of dicts; skipped without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'dspark-jax[tpu]'")

    def run(kind, script):
        said = _python(AHEAD + script, kind, environment=ENVIRONMENT)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    return run


@pytest.fixture(scope="session")
def updates_in_place(ahead):
    """updates_in_place(kind, script, count, share): compiled so often, a kernel writes where the array lies, without a
    loop and with temporaries of less than that share of the array, whose bytes the script reports as `array`."""

    def check(kind, script, count, share):
        found = ahead(kind, script)
        assert len(found) == count
        for facts in found:
            assert facts["kernels"] == 1, facts
            assert facts["copied"] == [], facts
            assert facts["loops"] == 0, facts
            assert facts["temporaries"] < facts["array"] * share, facts

    return check


@pytest.fixture(scope="session")
def simulated():
    """simulated(script): run it on a mesh of 2 x 1 x 2 simulated devices; what it asserts is the test."""

    def run(script):
        said = _python(SIMULATED + script + 'print("ran")', environment={"JAX_PLATFORMS": "cpu"})
        assert said.strip() == "ran"

    return run


def _python(script, *arguments, environment):
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[2],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
