"""What this machine reaches: the rates that measurements are held against."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def copy_bandwidth(dtype: jnp.dtype) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 1 << 26 if jax.default_backend() == "cpu" else 4 << 30
    x = jnp.zeros(size // dtype.itemsize, dtype)
    return 2 * x.nbytes / _each(jax.jit(lambda x: x + 1, donate_argnums=0), x)


def matmul_rate(dtype: jnp.dtype) -> float:
    """Operations a second of a large product."""
    side = 1024 if jax.default_backend() == "cpu" else 8192
    return 2 * side**3 / _each(jax.jit(lambda x: x @ x), jnp.zeros((side, side), dtype))


def _each(run: Callable[[jax.Array], jax.Array], x: jax.Array, times: int = 20) -> float:
    """Seconds of each of so many runs that follow each other."""
    x = jax.block_until_ready(run(x))
    began = time.perf_counter()
    for _ in range(times):
        x = run(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - began) / times
