"""Eagle3 for Qwen3-8B, with the released recipe."""

from dspark_jax.training.released import QWEN3_8B, eagle3

config = eagle3(QWEN3_8B)
