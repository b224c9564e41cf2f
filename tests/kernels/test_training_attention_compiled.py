"""The training attention kernel compiled ahead for every TPU, and spread over simulated devices."""

import pytest

ONE = """
from dspark_jax.kernels.training_attention import training_attention

BATCH, ANCHORS, BLOCK, LENGTH = 1, 512, 7, 4096

for channels, heads, kv_heads, dtype in (
    (64, 9, 3, jnp.float32),
    (128, 32, 8, jnp.bfloat16),
    (128, 16, 8, jnp.float32),
    (256, 16, 8, jnp.bfloat16),
    # Gemma's drafter, whose tiles do not fit a v4.
    *([(512, 16, 1, jnp.bfloat16)] if sys.argv[1] != "v4" else []),
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
        compiled,
        context.shape,
        case=f"{channels} {dtype.__name__}",
        # What the dense mask's scores alone would take, in float32.
        dense=4 * BATCH * heads * queries * (LENGTH + queries),
    )
"""


@pytest.mark.slow
def test_every_tpu_takes_forward_and_backward_in_a_fraction_of_the_dense_memory(ahead, kind):
    found = ahead(kind, ONE)
    assert len(found) == 4 + (kind != "v4")
    for facts in found:
        assert facts["kernels"] == 3, facts
        assert facts["temporaries"] < facts["dense"] / 4, facts


SIMULATED = """
from dspark_jax.kernels.training_attention import sharded_training_attention
from dspark_jax.ops.training_attention import training_attention

arrays = (draw(2, 12, 4, 64), *draw(2, 2, 2, 60, 64), *draw(2, 2, 2, 12, 64))
anchors = jnp.array([[3, 20, 41, 59], [8, 9, 10, 0]])
starts = jnp.array([[0, 15, 15, 50], [0, 0, 9, 0]])
slow = lambda *x: jnp.sum(training_attention(*x, anchors, starts, scale=0.2) ** 3)
fast = lambda *x: jnp.sum(sharded_training_attention(mesh, *x, anchors, starts, scale=0.2, interpret=True) ** 3)
every = range(5)
for a, b in zip(jax.jit(jax.grad(fast, every))(*arrays), jax.jit(jax.grad(slow, every))(*arrays), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
"""


@pytest.mark.slow
def test_four_simulated_devices_compute_what_one_does(simulated):
    simulated(SIMULATED)
