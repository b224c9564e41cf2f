"""The one transformer block against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.block import Attention, Block, LayerSpec
from dspark_jax.ops.rope import RopeSpec, rotate

SPEC = {"d_model": 12, "ffw": 20, "heads": 4, "kv_heads": 2, "head_dim": 6, "rope": RopeSpec(), "norm_eps": 1e-5}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 12)).astype(np.float32)
POSITIONS = np.array([[0, 1, 2], [7, 8, 9]], np.int32)


def rms(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)


def test_heads_must_share_keys_evenly():
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        LayerSpec(**SPEC | {"kv_heads": 3})


def test_attention_scale_is_of_the_head_size():
    assert LayerSpec(**SPEC).attention_scale == pytest.approx(6**-0.5)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_queries_and_keys_are_projected_normed_and_rotated_and_values_are_not(built, qk_norm):
    module = built(lambda: Attention(LayerSpec(**SPEC, qk_norm=qk_norm), rngs=nnx.Rngs(0), dtype=jnp.float32))
    q = np.einsum("btd,dhc->bthc", X, module.q[...])
    k, v = (np.einsum("btd,djc->btjc", X, module.kv[...][:, half]) for half in range(2))
    if qk_norm:
        module.q_norm.scale[...], module.k_norm.scale[...] = jnp.arange(1.0, 7), jnp.arange(2.0, 8)
        q, k = rms(q) * np.arange(1, 7), rms(k) * np.arange(2, 8)
    expected_q, expected_k = (rotate(jnp.asarray(x, jnp.float32), jnp.asarray(POSITIONS), RopeSpec()) for x in (q, k))
    keys, values = module.keys_values(jnp.asarray(X), jnp.asarray(POSITIONS))
    np.testing.assert_allclose(module.queries(jnp.asarray(X), jnp.asarray(POSITIONS)), expected_q, atol=1e-5)
    np.testing.assert_allclose(keys, expected_k.swapaxes(1, 2), atol=1e-5)
    np.testing.assert_allclose(values, v.swapaxes(1, 2), atol=1e-5)


def test_every_product_contracts_one_dimension_so_that_none_has_its_weights_copied(built):
    """With two, XLA may order them as the other operand lies (seen on a GPU, for the output kernel)."""
    block = built(lambda: Block(LayerSpec(**SPEC), rngs=nnx.Rngs(0), dtype=jnp.float32))
    program = jax.make_jaxpr(lambda x: block(x, jnp.asarray(POSITIONS), lambda q, k, v: (q, None))[0])(X)
    contracted = [
        len(equation.params["dimension_numbers"][0][1])
        for equation in program.eqns
        if equation.primitive.name == "dot_general"
    ]
    assert contracted == [1] * 5


def test_a_block_adds_attention_then_feed_forward_each_of_a_normed_input(built):
    block = built(lambda: Block(LayerSpec(**SPEC), rngs=nnx.Rngs(0), dtype=jnp.float32))
    block.input_norm.scale[...] = jnp.linspace(0.5, 2, 12)
    block.mlp_norm.scale[...] = jnp.linspace(2, 0.5, 12)
    seen = {}

    def attend(q, k, v):
        seen.update(q=q, k=k, v=v)
        return q * 2, "carried"

    out, carry = block(jnp.asarray(X), jnp.asarray(POSITIONS), attend)
    assert carry == "carried"
    normed = jnp.asarray(rms(X) * np.linspace(0.5, 2, 12), jnp.float32)
    keys, values = block.attention.keys_values(normed, jnp.asarray(POSITIONS))
    np.testing.assert_allclose(seen["k"], keys, atol=1e-5)
    np.testing.assert_allclose(seen["v"], values, atol=1e-5)
    mixed = np.einsum("bthc,hcd->btd", seen["q"] * 2, block.attention.o[...])
    between = X + mixed
    scaled = jnp.asarray(rms(between) * np.linspace(2, 0.5, 12), jnp.float32)
    np.testing.assert_allclose(out, between + np.asarray(block.mlp(scaled)), atol=1e-5)


def test_a_pass_copies_no_weights(built):
    block = built(lambda: Block(LayerSpec(**SPEC), rngs=nnx.Rngs(0), dtype=jnp.float32))

    def through(block, x_BTD, positions_BT):
        return block(x_BTD, positions_BT, lambda q, k, v: (q, (k, v)))

    compiled = jax.jit(through).lower(block, jnp.asarray(X), jnp.asarray(POSITIONS)).compile().as_text()
    assert "dot(" in compiled
    assert "block.attention.kv" in compiled
    moves = [line for line in compiled.splitlines() if " copy(" in line or " transpose(" in line]
    assert [line for line in moves if 'op_name="block.' in line] == []
