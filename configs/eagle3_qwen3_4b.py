"""Eagle3 for Qwen3-4B, with the released recipe."""

from dspark_jax.training.released import QWEN3_4B, eagle3

config = eagle3(QWEN3_4B)
