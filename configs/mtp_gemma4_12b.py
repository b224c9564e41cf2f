"""MTP-1 for Gemma 4 12B, with the released recipe."""

from dspark_jax.training.released import GEMMA4_12B, mtp

config = mtp(GEMMA4_12B)
