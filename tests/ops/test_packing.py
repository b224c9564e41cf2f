"""Packing ragged rows on one axis and back."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark_jax.ops.packing import packing

WIDTH = 3


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, WIDTH), min_size=4, max_size=4), st.sampled_from([4, 8, 12]))
def test_packing_is_a_plain_loop_and_unpacking_its_inverse(counts, size):
    """Empty rows and room to spare included; a slot that a row does not have repeats its last token."""
    assume(sum(counts) <= size)
    x_BT = np.arange(4 * WIDTH, dtype=np.int32).reshape(4, WIDTH)
    packed, unpacked = roundtrip(np.int32(counts), x_BT, size)
    expected = [x_BT[row, slot] for row, count in enumerate(counts) for slot in range(count)]
    assert packed[: len(expected)].tolist() == expected
    assert packed.shape == (size,)
    for row, count in enumerate(counts):
        if count:
            assert unpacked[row].tolist() == x_BT[row, np.minimum(range(WIDTH), count - 1)].tolist()


@jax.jit
def both(place, x_BT):
    packed = place.pack(x_BT)
    return packed, place.unpack(packed)


def roundtrip(counts, x_BT, size):
    return map(np.asarray, both(packing(jnp.asarray(counts), WIDTH, size), x_BT))
