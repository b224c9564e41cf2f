"""Eagle3 for Gemma 4 12B, with the released recipe."""

from dspark_jax.training.released import GEMMA4_12B, eagle3

config = eagle3(GEMMA4_12B)
