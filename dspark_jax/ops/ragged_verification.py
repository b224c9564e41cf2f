"""The target's attention over packed tokens and paged keys and values, in plain code: the twin of the kernel."""

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.ops.attention import attention
from dspark_jax.ops.block_attention import gather_pages
from dspark_jax.ops.masks import causal_mask
from dspark_jax.ops.packing import packing


def ragged_verification(
    q_NHC: Float[Array, "N H C"],
    pages_PSXC: Float[Array, "P S X C"],
    pages_BI: Int[Array, "B I"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "N H C"]:
    """Row b's count_B[b] tokens, packed in order of rows, at positions start_B[b].. see their row up to themselves.

    Even heads of the pages are keys, odd ones values.
    """
    size = q_NHC.shape[0]
    packed = packing(count_B, size, size)
    keys, values = (gather_pages(pages_PSXC[:, :, kind::2].swapaxes(1, 2), pages_BI) for kind in (0, 1))
    mask = causal_mask(start_B, size, keys.shape[2], window)
    return packed.pack(attention(packed.unpack(q_NHC), keys, values, mask, scale=scale, soft_cap=soft_cap))
