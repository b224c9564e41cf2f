"""The drafter that never drafts."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.ops.sampling import SamplingLaw


def test_no_drafter_is_a_drafter_without_parameters_that_proposes_nothing(vocabulary):
    drafter = NoDrafter()
    assert isinstance(drafter, Drafter)
    assert (drafter.block_size, drafter.tapped_layers) == (0, ())
    assert jax.tree.leaves((drafter, drafter.init_state(2, 8, jnp.float32))) == []
    law = SamplingLaw(
        temperature_B=jnp.ones(2),
        top_k_B=jnp.zeros(2, jnp.int32),
        top_p_B=jnp.ones(2),
        keys_B=jax.random.split(jax.random.key(0), 2),
    )
    proposal, state = drafter.propose(vocabulary, (), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), law)
    assert state == ()
    assert proposal.tokens_BK.shape == proposal.logit_BK.shape == (2, 0)
    assert proposal.probs_BKV.shape == (2, 0, 20)


def test_what_lacks_a_part_of_the_protocol_is_no_drafter():
    assert not isinstance(object(), Drafter)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (Eagle3Config, {"tapped_layers": ()}, "tapped_layers must be one or more different layers"),
        (Eagle3Config, {"tapped_layers": (1, 1)}, "tapped_layers must be one or more different layers"),
        (Eagle3Config, {"tapped_layers": (3,)}, r"tapped_layers \(3,\) must lie in -1..2"),
        (Eagle3Config, {"tapped_layers": (1,), "block_size": 0}, "block_size must be"),
        (Eagle3Config, {"tapped_layers": (1,), "step_decay": 0.0}, "step_decay must be above 0"),
        (MtpConfig, {"block_size": True}, "block_size must be a whole number of at least 1, not True"),
        (MtpConfig, {"step_decay": -1.0}, "step_decay must be above 0"),
        (DSparkConfig, {"tapped_layers": (), "mask_token_id": 0}, "tapped_layers must be"),
        (DSparkConfig, {"tapped_layers": (1,), "mask_token_id": 0, "num_layers": 0}, "num_layers must be"),
        (
            DSparkConfig,
            {"tapped_layers": (1,), "mask_token_id": 0, "markov_head": VanillaMarkov(rank=0)},
            "markov_rank must be",
        ),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_the_field(small_config, kind, fields, words):
    with pytest.raises(ValueError, match=f"drafter: {words}"):
        kind(vocab_size=20, layer=small_config.layer, num_target_layers=4, **fields)


@pytest.mark.parametrize("confidence", [True, False])
def test_dspark_is_a_drafter(small, confidence):
    assert isinstance(small(confidence=confidence), Drafter)
