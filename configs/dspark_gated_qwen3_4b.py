"""DSpark with its gated head for Qwen3-4B, otherwise the released recipe."""

from dspark_jax.drafters.heads import GatedMarkov
from dspark_jax.training.released import QWEN3_4B, dspark

config = dspark(QWEN3_4B, GatedMarkov())
