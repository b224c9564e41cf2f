"""What a run would allocate on a named machine, from shapes alone."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from dspark_jax.core.arrays import DType
from dspark_jax.core.mesh import sharding, variable_sharding
from dspark_jax.targets.model import Target, TargetSpec
from dspark_jax.training.activations import Activations, estimate_activations
from dspark_jax.training.config import TrainConfig, require_batch
from dspark_jax.training.draft import DrafterConfig, draft_config, new_drafter
from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer
from dspark_jax.training.step import TrainState, init_state
from dspark_jax.training.topology import Topology, mesh_of

_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Parameters of one name, layer numbers left out, and how each is split."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: PartitionSpec
    count: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes are bytes of one device, `parts` by what they hold."""

    drafter_config: DrafterConfig
    topology: Topology
    mesh: AbstractMesh
    rows: int
    target_parameters: int
    drafter_parameters: int
    borrowed_parameters: int
    target_kinds: tuple[Kind, ...]
    drafter_kinds: tuple[Kind, ...]
    parts: dict[str, int]
    activations: Activations

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.activations.peak

    @property
    def fits(self) -> bool:
        return self.total <= self.topology.hbm


def plan_run(config: TrainConfig, spec: TargetSpec, topology: Topology) -> Plan:
    """ValueError when the batch or a parameter does not divide over the machine's devices."""
    mesh = mesh_of(topology, fsdp=config.fsdp, tensor=config.tensor)
    ways = mesh.size // config.tensor
    require_batch(config, ways)
    drafter_config = draft_config(config.drafter, spec)
    target = _target_parts(spec, config.dtype)
    state = abstract_state(drafter_config, config.optimizer)
    drafter, moments = (_Part(module=state.drafter),), (_Part(module=state.opt_state),)
    rows = config.batch_size // ways // config.accumulate
    masters = _device_bytes(mesh, drafter)
    return Plan(
        drafter_config=drafter_config,
        topology=topology,
        mesh=mesh,
        rows=rows,
        target_parameters=_count(target),
        drafter_parameters=_count(drafter),
        borrowed_parameters=_count(target[:1]),
        target_kinds=_kinds(mesh, target),
        drafter_kinds=_kinds(mesh, drafter),
        parts={
            f"target parameters ({config.precision})": _device_bytes(mesh, target),
            "drafter masters (float32)": masters,
            "optimizer moments (float32)": _device_bytes(mesh, moments),
            "gradients (float32)": masters,
            f"drafter's copy to compute with ({config.precision})": masters * config.dtype.itemsize // 4,
        },
        activations=estimate_activations(config, spec, drafter_config, rows=rows, tensor=config.tensor),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A module of shapes that occurs `times` times."""

    module: Any
    prefix: str = ""
    times: int = 1


@lru_cache(maxsize=8)
def _target_parts(spec: TargetSpec, dtype: DType) -> tuple[_Part, ...]:
    """Vocabulary, layers, norm. Layers alike are built once: tracing all of them takes many seconds."""
    alike = Counter(spec.layers)
    few = replace(spec, layers=tuple(alike))
    target = nnx.eval_shape(lambda: Target(few, rngs=nnx.Rngs(0), dtype=dtype))
    layers = (
        _Part(module=layer, prefix="layers[*].", times=times)
        for layer, times in zip(target.layers, alike.values(), strict=True)
    )
    return (
        _Part(module=target.vocabulary, prefix="vocabulary."),
        *layers,
        _Part(module=target.norm, prefix="norm."),
    )


@lru_cache(maxsize=8)
def abstract_state(drafter_config: DrafterConfig, optimizer: OptimizerConfig) -> TrainState:
    drafter = nnx.eval_shape(lambda: new_drafter(drafter_config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    update = build_optimizer(optimizer, _STEPS)
    return jax.eval_shape(lambda drafter: init_state(drafter, update, jax.random.key(0)), drafter)


def _variables(parts: tuple[_Part, ...]) -> Iterator[tuple[str, nnx.Variable, int]]:
    for part in parts:
        leaves = jax.tree_util.tree_leaves_with_path(part.module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable) and jax.tree.leaves(leaf):
                yield part.prefix + jax.tree_util.keystr(path).lstrip("."), leaf, part.times


def _count(parts: tuple[_Part, ...]) -> int:
    return sum(math.prod(leaf.shape) * times for _, leaf, times in _variables(parts))


def _device_bytes(mesh: AbstractMesh, parts: tuple[_Part, ...]) -> int:
    return sum(
        math.prod(_shard(mesh, name, leaf)) * jnp.dtype(leaf.dtype).itemsize * times
        for name, leaf, times in _variables(parts)
    )


def _shard(mesh: AbstractMesh, name: str, leaf: nnx.Variable) -> tuple[int, ...]:
    """The part of a parameter that one device holds."""
    axes, split = leaf.get_metadata()["axes"], variable_sharding(mesh, leaf)
    for axis, size, over in zip(axes, leaf.shape, split.spec, strict=False):
        if over is not None and size % mesh.shape[over]:
            raise ValueError(
                f"{name}: its {size} {axis} do not divide over {over}={mesh.shape[over]}; choose another {over}"
            )
    return split.shard_shape(leaf.shape)


def _kinds(mesh: AbstractMesh, parts: tuple[_Part, ...]) -> tuple[Kind, ...]:
    counts: Counter[tuple] = Counter()
    for path, leaf, times in _variables(parts):
        name, axes = re.sub(r"\[\d+\]", "[*]", path), leaf.get_metadata()["axes"]
        counts[name, tuple(leaf.shape), axes, sharding(mesh, *axes).spec] += times
    return tuple(
        Kind(name=name, shape=shape, axes=axes, spec=spec, count=count)
        for (name, shape, axes, spec), count in counts.items()
    )
