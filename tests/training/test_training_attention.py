"""The loss of a drafter and its gradient by the training kernel are those by plain operations."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.core.mesh import MESH_AXES, make_mesh, on_mesh
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.objective import LossWeights, block_objective, total_loss
from dspark_jax.nn.training_attention import KernelTraining, PlainTraining, training_suited_to

WEIGHTS = LossWeights()


def inputs(drafter, target):
    """Two rows, the first of two documents and the second with fewer blocks than there is room for."""
    rng = np.random.default_rng(0)
    starts_BT = np.zeros((2, 40), np.int32)
    starts_BT[0, 15:] = 15
    width = target.spec.d_model
    return {
        "tokens_BT": rng.integers(2, 40, (2, 40)).astype(np.int32),
        "loss_mask_BT": np.ones((2, 40), bool),
        "features_BTE": rng.normal(size=(2, 40, width * len(drafter.tapped_layers))).astype(np.float32),
        "hidden_BTD": rng.normal(size=(2, 40, width)).astype(np.float32),
        "anchors_BA": np.array([[3, 9, 20, 33], [5, 17, 0, 0]]),
        "keep_BA": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool),
        "starts_BT": starts_BT,
    }


def test_loss_and_gradient_by_the_kernel_are_the_plain_ones(tiny_target, tiny_drafter, built):
    drafter = built(lambda: DSpark(replace(tiny_drafter.config, num_layers=1), rngs=nnx.Rngs(0)))
    arrays = jax.tree.map(jnp.asarray, inputs(drafter, tiny_target))

    def loss(drafter, attention):
        terms = block_objective(drafter, tiny_target.vocabulary, weights=WEIGHTS, attention=attention, **arrays)
        return total_loss(terms, WEIGHTS)

    def gradient(attention):
        return jax.jit(jax.value_and_grad(partial(loss, attention=attention)))(drafter)

    mesh = make_mesh(devices=jax.devices()[:1])
    expected = jax.tree.leaves(gradient(PlainTraining()))
    with on_mesh(mesh):
        found = jax.tree.leaves(gradient(KernelTraining(mesh=mesh, interpret=True)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(jnp.abs(b).max())))
    assert all(np.any(np.asarray(leaf)) for leaf in expected[1:])


@pytest.mark.parametrize("count", [1, 4])
def test_tpus_and_no_others_take_the_kernel_unasked(count):
    class Tpu:
        platform = "tpu"

        def __init__(self, kind):
            self.device_kind = kind

    def mesh(kind):
        devices = np.array([Tpu(kind) for _ in range(count)])
        return Mesh(devices.reshape(count, 1, 1), MESH_AXES)

    new = mesh("TPU v5 lite")
    assert training_suited_to(new) == KernelTraining(mesh=new if count > 1 else None)
    assert training_suited_to(mesh("TPU v4")) == PlainTraining()
    assert training_suited_to(make_mesh(devices=jax.devices()[:1])) == PlainTraining()
