"""Pytrees of the package are frozen and can hold whatever jax puts into a tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.losses import Mean

MEAN = Mean(sum=jnp.array(3.0), count=jnp.array(2.0))


def test_a_tree_of_shapes_and_one_of_host_arrays():
    shapes = jax.eval_shape(lambda: MEAN)
    assert isinstance(shapes.sum, jax.ShapeDtypeStruct)
    assert isinstance(jax.device_get(MEAN).sum, np.ndarray)
    assert jax.tree.map(lambda leaf: leaf * 2, MEAN).value == 1.5


def test_fields_are_replaced_and_never_assigned():
    assert MEAN.replace(count=jnp.array(3.0)).value == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        MEAN.sum = jnp.array(1.0)
