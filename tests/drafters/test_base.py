"""The drafter that never drafts."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.drafters.base import Drafter, NoDrafter
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


@pytest.mark.parametrize("confidence", [True, False])
def test_dspark_is_a_drafter(small, confidence):
    assert isinstance(small(confidence=confidence), Drafter)
