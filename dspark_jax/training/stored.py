"""What a target makes of a batch, as a cache holds it: numbers of one dtype, or 8-bit ones with their scales."""

from typing import Literal

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, DType, Float, Shaped, pytree
from dspark_jax.targets.model import TargetOutput

StoredDType = Literal["float32", "bfloat16", "int8"]
_LARGEST = 127


@pytree
class Stored:
    """The tapped layers' outputs and, last along M, the normed hidden states."""

    values_BTMD: Shaped[Array, "B T M D"]
    scale_BTM: Float[Array, "B T M"] | None
    """Of 8-bit values: what they are multiplied with."""

    def output(self, dtype: DType) -> TargetOutput:
        """As the target would have given it, but for what was rounded."""
        values_BTMD = self.values_BTMD
        if self.scale_BTM is not None:
            values_BTMD = values_BTMD.astype(jnp.float32) * self.scale_BTM[..., None]
        values_BTMD = values_BTMD.astype(dtype)
        features_BTMD = values_BTMD[..., :-1, :]
        features_BTE = features_BTMD.reshape(*features_BTMD.shape[:2], -1)
        return TargetOutput(hidden_BTD=values_BTMD[..., -1, :], features_BTE=features_BTE, cache=None)


def store(seen: TargetOutput, dtype: StoredDType) -> Stored:
    """Rounded to `dtype`: of int8 by at most half a 127th of the largest number of the same position and tap."""
    hidden_BTD = seen.hidden_BTD
    taps = seen.features_BTE.shape[-1] // hidden_BTD.shape[-1]
    features_BTMD = seen.features_BTE.reshape(*hidden_BTD.shape[:2], taps, hidden_BTD.shape[-1])
    values_BTMD = jnp.concatenate([features_BTMD, hidden_BTD[..., None, :]], axis=-2)
    if dtype != "int8":
        return Stored(values_BTMD=values_BTMD.astype(dtype), scale_BTM=None)
    values_BTMD = values_BTMD.astype(jnp.float32)
    # A number that is not finite makes its scale so: the row is left out of the loss, as it would be online.
    scale_BTM = jnp.max(jnp.abs(values_BTMD), axis=-1) / _LARGEST
    steps_BTMD = values_BTMD / jnp.where(scale_BTM > 0, scale_BTM, 1)[..., None]
    return Stored(values_BTMD=jnp.round(steps_BTMD).astype(jnp.int8), scale_BTM=scale_BTM)
