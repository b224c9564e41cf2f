"""DSpark for Qwen3-8B, with the released recipe."""

from dspark_jax.training.released import QWEN3_8B, dspark

config = dspark(QWEN3_8B)
