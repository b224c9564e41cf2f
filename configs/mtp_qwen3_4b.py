"""MTP-1 for Qwen3-4B, with the released recipe."""

from dspark_jax.training.released import QWEN3_4B, mtp

config = mtp(QWEN3_4B)
