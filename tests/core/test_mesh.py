"""The mesh, and parameters placed on it by the names of their dimensions."""

import os
import subprocess
import sys
import textwrap

import jax
import pytest
from flax import nnx

from dspark_jax.core.mesh import MESH_AXES, RULES, make_mesh, module_shardings, sharding


def parameters(*modules):
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return [leaf for leaf in jax.tree.leaves(modules, is_leaf=is_variable) if is_variable(leaf)]


def test_every_parameter_names_each_of_its_dimensions_by_a_rule(tiny_target, tiny_drafter):
    found = parameters(tiny_target, tiny_drafter)
    assert len(found) == len(jax.tree.leaves((tiny_target, tiny_drafter)))
    for parameter in found:
        axes = parameter.get_metadata()["axes"]
        assert len(axes) == parameter[...].ndim
        assert set(axes) <= RULES.keys()
        mesh_axes = [RULES[axis] for axis in axes if RULES[axis]]
        assert len(mesh_axes) == len(set(mesh_axes)), f"{axes} would shard two dimensions over one mesh axis"


def test_rules_point_at_axes_of_the_mesh():
    for rule in RULES.values():
        assert set((rule,) if isinstance(rule, str) else rule or ()) <= set(MESH_AXES)


def test_data_takes_the_devices_the_others_leave():
    mesh = make_mesh()
    assert mesh.axis_names == MESH_AXES
    assert mesh.devices.shape == (len(jax.devices()), 1, 1)
    assert sharding(mesh, "batch", None, "vocab").spec == jax.P(("data", "fsdp"), None, "tensor")


def test_factors_that_do_not_divide_the_devices_are_refused():
    with pytest.raises(ValueError, match=r"fsdp=3 x tensor=2 does not divide 1 devices"):
        make_mesh(fsdp=3, tensor=2, devices=jax.devices()[:1])


def test_shardings_keep_the_modules_structure(tiny_drafter):
    shardings = module_shardings(make_mesh(devices=jax.devices()[:1]), tiny_drafter)
    assert jax.tree.structure(shardings) == jax.tree.structure(tiny_drafter)


def test_eight_devices_compute_what_one_does(golden):
    """In a process of its own: the number of simulated devices is fixed when jax starts."""
    program = f"""
        import jax, numpy as np
        from pathlib import Path
        from dspark_jax.core.mesh import make_mesh, module_shardings, sharding
        from dspark_jax.interop.huggingface import load_target

        target = load_target(Path({str(golden / "targets" / "llama_tiny")!r}), "float32")
        tokens = np.arange(64, dtype=np.int32).reshape(4, 16)
        encode = jax.jit(lambda target, tokens: target.encode(tokens, (0,)).hidden_BTD)
        expected = encode(target, tokens)

        mesh = make_mesh(fsdp=2, tensor=2)
        assert mesh.devices.shape == (2, 2, 2), mesh
        placed = jax.device_put(target, module_shardings(mesh, target))
        q = placed.layers[0].attention.q[...]
        assert q.shape == (64, 4, 16) and q.addressable_shards[0].data.shape == (32, 2, 16), q.sharding
        assert placed.layers[0].mlp.down[...].addressable_shards[0].data.shape == (80, 32)
        found = encode(placed, jax.device_put(tokens, sharding(mesh, "batch", None)))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    """
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
