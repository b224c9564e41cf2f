"""MTP-1 for Qwen3-8B, with the released recipe."""

from dspark_jax.training.released import QWEN3_8B, mtp

config = mtp(QWEN3_8B)
