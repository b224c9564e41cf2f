"""Rounds of a TPU that is not there: compiled ahead of time, their operations and bytes over the peaks.

XLA counts what passes between its fusions whether or not it leaves the chip, so small models look slower than they are.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.measure import plans
from dspark_jax.decoding.profile import Shape
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import init_state
from dspark_jax.decoding.scheduler import Guide
from dspark_jax.nn.paged_cache import InRows
from dspark_jax.ops.sampling import Draws
from dspark_jax.targets.model import Target, TargetSpec
from dspark_jax.training.draft import Drafter, DrafterConfig, new_drafter
from dspark_jax.training.topology import ACCELERATORS, parse_topology

Tree = TypeVar("Tree")

# The smallest slice of each kind that libtpu compiles for; of its chips one is used.
_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

OVERHEAD = 1e-4
"""Seconds of a round that no roofline shows: its launch, and the host's part."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is predicted, and for which kind of chip."""

    kind: str
    spec: TargetSpec
    drafter: DrafterConfig
    dtype: str
    rule: Rule

    @property
    def method(self) -> str:
        """Where the seconds come from."""
        chip = ACCELERATORS[self.kind]
        return (
            f"roofline of the program compiled for one {self.kind} device: the larger of its operations over "
            f"{chip.flops / 1e12:g} TFLOP/s (bfloat16) and its bytes over {chip.bandwidth / 1e9:g} GB/s, as XLA counts "
            f"both, plus {OVERHEAD * 1e3:g} ms"
        )


def tpu_kind(topology: str) -> str:
    """The kind of TPU that a --topology names."""
    parse_topology(topology)
    kind = topology.partition(":")[0]
    if kind not in _SLICES:
        raise ValueError(f"--topology {topology}: programs are compiled ahead for TPUs only ({', '.join(_SLICES)})")
    return kind


def predicted_seconds(kind: str, flops: float, moved: float) -> float:
    """Of a round with so many operations that moves so many bytes."""
    return ACCELERATORS[kind].seconds(flops, moved) + OVERHEAD


def fingerprint_of(subject: Subject) -> Fingerprint:
    """The fingerprint that serving has on that chip."""
    return Fingerprint.of(*_shapes(subject), dtype=subject.dtype, rule=subject.rule)


def predicted_round(subject: Subject, rows: int, span: int, index: int) -> tuple[Shape, float]:
    """The shape of a round, plans(rows, ...)[index], and its seconds."""
    plan, tokens = plans(rows, subject.drafter.block_size, subject.rule)[index]
    target, drafter = _shapes(subject)
    # In pages the attention is JAX's kernel, which does not say what it computes and moves.
    target = target.with_cache_form(InRows())
    dtype = jnp.dtype(subject.dtype)
    state, guide = jax.eval_shape(
        lambda: (init_state(target, drafter, rows, span, dtype), Guide.unguided(rows, drafter.block_size))
    )
    state, guide = _placed((state, guide), _device(subject.kind))
    try:
        compiled = Programs(target, drafter, dtype=dtype).lower(plan, state, guide, Draws.PLAIN).compile()
    except jax.errors.JaxRuntimeError as error:
        # Its own class does not travel between processes.
        raise ValueError(f"a round of {rows} rows of {span} positions: {str(error).splitlines()[0]}") from None
    cost = compiled.cost_analysis()
    assert cost is not None
    seconds = predicted_seconds(subject.kind, cost["flops"], cost["bytes accessed"])
    return Shape(rows, span, tokens, plan.drafts or 0), seconds


@lru_cache(maxsize=1)
def _device(kind: str) -> SingleDeviceSharding:
    described = topologies.get_topology_desc(platform="tpu", topology_name=_SLICES[kind])
    return SingleDeviceSharding(described.devices[0])


@lru_cache(maxsize=1)
def _shapes(subject: Subject) -> tuple[Target, Drafter]:
    dtype = jnp.dtype(subject.dtype)
    pair = nnx.eval_shape(
        lambda: (
            Target(subject.spec, rngs=nnx.Rngs(0), dtype=dtype),
            new_drafter(subject.drafter, rngs=nnx.Rngs(0), dtype=dtype),
        )
    )
    return _placed(pair, _device(subject.kind))


def _placed(tree: Tree, where: SingleDeviceSharding) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)
