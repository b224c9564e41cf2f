"""Writing packed entries into pages, in plain code: the twin of the kernel."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int


def write_pages(
    pages_PSXC: Float[Array, "P S X C"],
    new_NXC: Float[Array, "N X C"],
    pages_BI: Int[Array, "B I"],
    first_B: Int[Array, "B"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    *,
    width: int,
) -> Float[Array, "P S X C"]:
    """Row b's count_B[b] <= width entries from first_B[b] on, at its positions start_B[b].. and nowhere else.

    Position s of row b is in page pages_BI[b, s // S].
    """
    pages, size = pages_PSXC.shape[:2]
    slot_T = jnp.arange(width)
    position_BT = start_B[:, None] + slot_T
    page_BT = jnp.take_along_axis(pages_BI, position_BT // size, axis=1, mode="clip")
    # There is no such page.
    page_BT = jnp.where(slot_T < count_B[:, None], page_BT, pages)
    entry_BT = jnp.minimum(first_B[:, None] + slot_T, new_NXC.shape[0] - 1)
    new_BTXC = new_NXC[entry_BT].astype(pages_PSXC.dtype)
    return pages_PSXC.at[page_BT, position_BT % size].set(new_BTXC, mode="drop")
