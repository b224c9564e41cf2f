"""A small random drafter and a vocabulary to lend it."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import Vocabulary, VocabularySpec
from dspark_jax.ops.rope import RopeSpec

LAYER = LayerSpec(d_model=16, ffw=24, heads=2, kv_heads=1, head_dim=8, rope=RopeSpec(), norm_eps=1e-5, qk_norm=True)
CONFIG = DSparkConfig(
    vocab_size=20,
    layer=LAYER,
    num_target_layers=3,
    tapped_layers=(0, -1),
    mask_token_id=19,
    num_layers=2,
    block_size=3,
    markov_head=VanillaMarkov(rank=4),
)

VOCABULARY = VocabularySpec(size=20, d_model=16, tied=False)


@pytest.fixture(scope="session")
def small_config():
    return CONFIG


@pytest.fixture(scope="session")
def small(built):
    """small(**changes): a random drafter of the small config with these fields changed."""
    return lambda **changes: built(lambda: DSpark(replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def vocabulary(built):
    return built(lambda: Vocabulary(VOCABULARY, rngs=nnx.Rngs(0), dtype=jnp.float32), seed=1)
