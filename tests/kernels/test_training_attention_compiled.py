"""The training attention kernel compiled ahead for every TPU, and spread over simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE = """
from functools import partial

from dspark_jax.kernels.training_attention import training_attention

BATCH, ANCHORS, BLOCK, LENGTH = 1, 512, 7, 4096

for channels, heads, kv_heads, dtype in (
    (64, 9, 3, jnp.float32),
    (128, 32, 8, jnp.bfloat16),
    (128, 16, 8, jnp.float32),
    (256, 16, 8, jnp.bfloat16),
):
    queries = ANCHORS * BLOCK
    q = shape(BATCH, queries, heads, channels, dtype=dtype)
    context = shape(BATCH, kv_heads, LENGTH, channels, dtype=dtype)
    own = shape(BATCH, kv_heads, queries, channels, dtype=dtype)
    places = (shape(BATCH, ANCHORS, dtype=jnp.int32),) * 2

    def loss(arrays, places):
        return jnp.sum(training_attention(*arrays, *places, scale=0.1, window=2000).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss)).lower((q, context, context, own, own), places).compile()
    report(
        case=f"{channels} {dtype.__name__}",
        kernels=compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        # What the dense mask's scores alone would take, in float32.
        dense=4 * BATCH * heads * queries * (LENGTH + queries),
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_tpu_takes_forward_and_backward_in_a_fraction_of_the_dense_memory(ahead, kind):
    found = ahead(kind, ONE)
    assert len(found) == 4
    for facts in found:
        assert facts["kernels"] == 3, facts
        assert facts["temporaries"] < facts["dense"] / 4, facts


SIMULATED = """
import jax

jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.mesh import make_mesh
from dspark_jax.kernels.training_attention import sharded_training_attention
from dspark_jax.ops.training_attention import training_attention

rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
arrays = (draw(2, 12, 4, 64), *draw(2, 2, 2, 60, 64), *draw(2, 2, 2, 12, 64))
anchors = jnp.array([[3, 20, 41, 59], [8, 9, 10, 0]])
starts = jnp.array([[0, 15, 15, 50], [0, 0, 9, 0]])
mesh = make_mesh(tensor=2)
assert mesh.devices.shape == (2, 1, 2)
slow = lambda *x: jnp.sum(training_attention(*x, anchors, starts, scale=0.2) ** 3)
fast = lambda *x: jnp.sum(sharded_training_attention(mesh, *x, anchors, starts, scale=0.2, interpret=True) ** 3)
every = range(5)
for a, b in zip(jax.jit(jax.grad(fast, every))(*arrays), jax.jit(jax.grad(slow, every))(*arrays), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_four_simulated_devices_compute_what_one_does():
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"
