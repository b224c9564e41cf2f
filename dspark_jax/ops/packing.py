"""Ragged rows on one packed axis, so that dense layers compute the tokens that are there and no others."""

import jax.numpy as jnp
from flax import struct

from dspark_jax.core.arrays import Array, Int, Shaped, pytree


@pytree
class Packing:
    """Row b's tokens are entries first_B[b].. of the packed axis, one row after the other."""

    row_N: Int[Array, "N"]
    """Row of each entry; entries past the last token repeat some token."""
    slot_N: Int[Array, "N"]
    """Its place in the row."""
    first_B: Int[Array, "B"]
    count_B: Int[Array, "B"]
    """Tokens of each row."""
    width: int = struct.field(pytree_node=False)
    """Slots a row may have."""

    def pack(self, x_BT: Shaped[Array, "B T *X"]) -> Shaped[Array, "N *X"]:
        """The entries of `x_BT`, T = width, that are on the packed axis."""
        return x_BT[self.row_N, self.slot_N]

    def unpack(self, x_N: Shaped[Array, "N *X"]) -> Shaped[Array, "B T *X"]:
        """Rows of `width` slots again; slots a row does not have repeat its last token, another's if it has none."""
        # Another's would bring along what is broken there.
        last_B1 = jnp.maximum(self.count_B - 1, 0)[:, None]
        entry_BT = self.first_B[:, None] + jnp.minimum(jnp.arange(self.width), last_B1)
        return x_N[jnp.minimum(entry_BT, x_N.shape[0] - 1)]


def packing(count_B: Int[Array, "B"], width: int, size: int) -> Packing:
    """Places the first count_B tokens of each row; at most `width` of a row and `size` in all, which is the caller's
    to keep."""
    end_B = jnp.cumsum(count_B)
    first_B = end_B - count_B
    # An entry's row is the number of rows that ended before it.
    row_N = jnp.cumsum(jnp.zeros(size, jnp.int32).at[end_B].add(1, mode="drop"))
    row_N = jnp.minimum(row_N, count_B.shape[0] - 1)
    slot_N = jnp.minimum(jnp.arange(size) - first_B[row_N], width - 1).astype(jnp.int32)
    return Packing(row_N=row_N, slot_N=slot_N, first_B=first_B.astype(jnp.int32), count_B=count_B, width=width)


def whole(batch: int, width: int) -> Packing:
    """Every row with `width` tokens."""
    return packing(jnp.full(batch, width, jnp.int32), width, batch * width)
