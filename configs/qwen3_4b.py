"""DSpark for Qwen3-4B, with the released recipe."""

from dspark_jax.training.released import QWEN3_4B, dspark

config = dspark(QWEN3_4B)
