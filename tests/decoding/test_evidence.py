"""What a confidence is made of is known before the draft it speaks of, for every kind of drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.confidence import HEAD_AND_DRAFT, Estimator
from dspark_jax.ops.sampling import SamplingLaw

ROWS = 48


@pytest.mark.parametrize("name", ["dspark_rnn_qwen3", "eagle3_qwen3"])
def test_evidence_of_a_draft_depends_on_no_token_from_it_on(golden_drafter, golden_target, name):
    drafter, target = golden_drafter(name), golden_target(name.split("_")[-1])
    law = SamplingLaw(
        temperature_B=jnp.full(ROWS, 0.7),
        top_k_B=jnp.full(ROWS, 3, jnp.int32),
        top_p_B=jnp.ones(ROWS),
        keys_B=jax.random.split(jax.random.key(0), ROWS),
    )

    @jax.jit
    def draft(drafter, vocabulary):
        state = drafter.init_state(ROWS, 16, jnp.float32)
        anchor_B, start_B = jnp.full(ROWS, 7, jnp.int32), jnp.zeros(ROWS, jnp.int32)
        proposal, _ = drafter.propose(vocabulary, state, anchor_B, start_B, law)
        return proposal.tokens_BK, Estimator.raw(drafter.block_size, HEAD_AND_DRAFT).evidence(proposal)

    tokens_BK, evidence_BKF = map(np.asarray, draft(drafter, target.vocabulary))
    assert evidence_BKF.shape == (*tokens_BK.shape, 3)
    for k in range(drafter.block_size - 1):
        ends: dict[tuple[int, ...], set[int]] = {}
        seen: dict[tuple[int, ...], np.ndarray] = {}
        for tokens, evidence in zip(tokens_BK, evidence_BKF, strict=True):
            before = tuple(tokens[:k])
            ends.setdefault(before, set()).add(tokens[k])
            np.testing.assert_allclose(evidence[k], seen.setdefault(before, evidence[k]), atol=1e-4)
        if k < 3:
            assert max(map(len, ends.values())) > 1, "drafts differ where the evidence must not"
    assert (evidence_BKF[..., 1] <= 0).all()
    assert (evidence_BKF[..., 2] >= 0).all()
    if name.startswith("dspark"):
        assert np.ptp(evidence_BKF[:, 2, 0]) > 0, "the tokens before it do count"
