"""MTP-1 for Qwen3-14B, with the released recipe."""

from dspark_jax.training.released import QWEN3_14B, mtp

config = mtp(QWEN3_14B)
