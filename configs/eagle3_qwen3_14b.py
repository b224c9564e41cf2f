"""Eagle3 for Qwen3-14B, with the released recipe."""

from dspark_jax.training.released import QWEN3_14B, eagle3

config = eagle3(QWEN3_14B)
