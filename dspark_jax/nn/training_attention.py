"""How the draft blocks of whole sequences attend in training: the ways there are, and the one that suits a mesh."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.kernels import training_attention as kernels
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import Pair
from dspark_jax.ops.long_attention import block_attention
from dspark_jax.ops.masks import first_seen


@runtime_checkable
class TrainingAttention(Protocol):
    """Blocks of Q / A slots at their anchors over their document's context before the anchor, and over themselves."""

    def __call__(
        self,
        spec: LayerSpec,
        q_BQHC: Float[Array, "B Q H C"],
        context: Pair,
        own: Pair,
        anchors_BA: Int[Array, "B A"],
        starts_BA: Int[Array, "B A"],
    ) -> Float[Array, "B Q H C"]:
        """`starts_BA`: where the anchors' documents begin."""
        ...


@dataclass(frozen=True)
class PlainTraining:
    """Blocks in chunks over the whole context; every device can do that, and XLA spreads it over any mesh."""

    def __call__(
        self,
        spec: LayerSpec,
        q_BQHC: Float[Array, "B Q H C"],
        context: Pair,
        own: Pair,
        anchors_BA: Int[Array, "B A"],
        starts_BA: Int[Array, "B A"],
    ) -> Float[Array, "B Q H C"]:
        anchors, slots = anchors_BA.shape[1], q_BQHC.shape[1] // anchors_BA.shape[1]
        positions_BAK = anchors_BA[..., None] + jnp.arange(slots)
        starts_BAK, last_BAK = (
            jnp.broadcast_to(x[..., None], positions_BAK.shape) for x in (starts_BA, anchors_BA - 1)
        )
        own_k, own_v = (x.reshape(*x.shape[:2], anchors, slots, -1) for x in own)
        mixed = block_attention(
            q_BQHC.reshape(q_BQHC.shape[0], anchors, slots, *q_BQHC.shape[2:]),
            context[0],
            context[1],
            own_k,
            own_v,
            first_seen(starts_BAK, positions_BAK, spec.window),
            last_BAK,
            scale=spec.attention_scale,
        )
        return mixed.reshape(q_BQHC.shape)


@dataclass(frozen=True, kw_only=True)
class KernelTraining:
    """The TPU kernel: no scores in memory, forward or backward, and none computed where nothing is visible.

    `mesh`: the one that rows and heads are spread over; its axes have to divide them.
    """

    mesh: Mesh | None = None
    interpret: bool = False

    def __call__(
        self,
        spec: LayerSpec,
        q_BQHC: Float[Array, "B Q H C"],
        context: Pair,
        own: Pair,
        anchors_BA: Int[Array, "B A"],
        starts_BA: Int[Array, "B A"],
    ) -> Float[Array, "B Q H C"]:
        arguments = (q_BQHC, *context, *own, anchors_BA, starts_BA)
        how = {"scale": spec.attention_scale, "window": spec.window, "interpret": self.interpret}
        if self.mesh is None:
            return kernels.training_attention(*arguments, **how)
        return kernels.sharded_training_attention(self.mesh, *arguments, **how)


def training_suited_to(mesh: Mesh) -> TrainingAttention:
    """The kernel on TPUs, else plain operations; these also on v4, whose VMEM does not hold tiles of wide heads."""
    if any(device.platform != "tpu" or "v4" in device.device_kind for device in mesh.devices.flat):
        return PlainTraining()
    return KernelTraining(mesh=mesh if mesh.size > 1 else None)
