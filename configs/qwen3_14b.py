"""DSpark for Qwen3-14B, with the released recipe."""

from dspark_jax.training.released import QWEN3_14B, dspark

config = dspark(QWEN3_14B)
