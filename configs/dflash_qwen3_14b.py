"""DFlash for Qwen3-14B, with the released recipe."""

from dspark_jax.training.released import QWEN3_14B, dflash

config = dflash(QWEN3_14B)
