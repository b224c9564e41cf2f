"""DSpark with its recurrent head for Qwen3-4B, otherwise the released recipe."""

from dspark_jax.drafters.heads import RnnMarkov
from dspark_jax.training.released import QWEN3_4B, dspark

config = dspark(QWEN3_4B, RnnMarkov())
