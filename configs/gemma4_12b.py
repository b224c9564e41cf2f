"""DSpark for Gemma 4 12B, with the released recipe."""

from dspark_jax.training.released import GEMMA4_12B, dspark

config = dspark(GEMMA4_12B)
