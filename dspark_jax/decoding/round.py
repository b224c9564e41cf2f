"""One round of speculative decoding for a batch of rows: draft, schedule, verify, commit.

Offline generation, evaluation during training and the server all run this function; with `NoDrafter` it is the
plain autoregressive loop.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, DType, Float, Int, Keys, pytree
from dspark_jax.decoding.rejection import Rule, judge
from dspark_jax.decoding.scheduler import FixedLength, Guide, Policy, verified_lengths
from dspark_jax.drafters.base import Drafter, no_drafts
from dspark_jax.nn.cache import Cache
from dspark_jax.ops.packing import packing
from dspark_jax.ops.sampling import SamplingLaw, law_probs, sample
from dspark_jax.targets.model import Target

_DRAFT, _JUDGE, _NEXT = 0, 1, 2


@pytree
class DecodeState:
    """Live rows between rounds. Caches hold everything committed before the anchor, and scratch from there on."""

    cache: Cache
    draft: Any
    anchor_B: Int[Array, "B"]
    """Last committed token."""
    position_B: Int[Array, "B"]
    """Its position: one less than the committed length."""
    law: SamplingLaw


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The shapes of a round, one compiled program each.

    `drafts`: drafted in every row, 0..K; the block when None, and 0 drafts nothing. `sizes`: token counts, rising, of
    which the round verifies the smallest that holds what the policy admits, packed on one axis; without any, every
    row verifies drafts + 1 tokens and lengths only decide which of them are judged.
    """

    policy: Policy = field(default_factory=FixedLength)
    drafts: int | None = None
    sizes: tuple[int, ...] = ()
    rule: Rule = Rule.TOKEN


@pytree
class RoundOutput:
    """What a round committed."""

    tokens_BN: Int[Array, "B N"]
    """Accepted drafts, then the resampled or bonus token; entries from count_B on are meaningless."""
    count_B: Int[Array, "B"]
    """Tokens committed: accepted drafts + 1."""
    verified_B: Int[Array, "B"]
    """Drafts the target judged."""
    confidence_BK: Float[Array, "B K"]
    """c_k as the estimator says."""
    evidence_BKF: Float[Array, "B K F"]
    """What it was told of each draft."""


def init_state(target: Target, drafter: Drafter, batch: int, span: int, dtype: DType) -> DecodeState:
    """Empty rows of `span` positions, greedy until told otherwise."""
    return DecodeState(
        cache=target.init_cache(batch, span, dtype),
        draft=drafter.init_state(batch, span, dtype),
        anchor_B=jnp.zeros(batch, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        law=SamplingLaw(
            temperature_B=jnp.zeros(batch, jnp.float32),
            top_k_B=jnp.zeros(batch, jnp.int32),
            top_p_B=jnp.ones(batch, jnp.float32),
            keys_B=jax.random.split(jax.random.key(0), batch),
        ),
    )


def prefill(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    tokens_BT: Int[Array, "B T"],
    next_tokens_BT: Int[Array, "B T"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> DecodeState:
    """Take in the first count_B tokens at start_B.. of each row. The anchor, the caller's to set, is not among them."""
    out = target.extend(state.cache, tokens_BT, start_B, drafter.tapped_layers)
    assert out.cache is not None
    return replace(
        state,
        cache=out.cache,
        draft=drafter.extend(state.draft, target.vocabulary, out.features_BTE, next_tokens_BT, start_B, count_B),
    )


def decode_round(
    target: Target, drafter: Drafter, plan: RoundPlan, state: DecodeState, guide: Guide | None = None
) -> tuple[DecodeState, RoundOutput]:
    """Commit between 1 and drafts + 1 tokens of every row. Rows need K + 1 free positions from their anchor on."""
    law, start_B = state.law, state.position_B
    batch = start_B.shape[0]
    if guide is None:
        guide = Guide.unguided(batch, drafter.block_size)
    # Every draw has a key of its own, made from the request's key, the position and the purpose: other rows, the
    # batch they sit in and drafts thrown away earlier have no part in it.
    keys_B = jax.vmap(jax.random.fold_in)(law.keys_B, start_B)

    def keys_for(purpose: int) -> Keys:
        return jax.vmap(lambda key: jax.random.fold_in(key, purpose))(keys_B)

    # Draft.
    if plan.drafts == 0:
        proposal, draft = no_drafts(batch, target.spec.vocab_size), state.draft
    else:
        proposal, draft = drafter.propose(
            target.vocabulary, state.draft, state.anchor_B, start_B, replace(law, keys_B=keys_for(_DRAFT)), plan.drafts
        )
    block = proposal.tokens_BK.shape[1]

    # Schedule.
    evidence_BKF = guide.estimator.evidence(proposal)
    confidence_BK = guide.estimator(evidence_BKF)
    lengths_B = verified_lengths(plan.policy, confidence_BK, guide, plan.sizes)

    # Verify and judge: entry i of a row's logits is the target's law of position start + i + 1.
    tokens_BN = jnp.concatenate([state.anchor_B[:, None], proposal.tokens_BK], axis=1)
    uniforms_BK = jax.vmap(lambda key: jax.random.uniform(key, (block,)))(keys_for(_JUDGE))

    def verify(size: int | None) -> tuple[Cache, Array, Array, Array]:
        count_B = jnp.where(guide.live_B, lengths_B + 1, 0)
        packed = None if size is None else packing(count_B, block + 1, size)
        out = target.extend(state.cache, tokens_BN, start_B, drafter.tapped_layers, packed)
        logits = target.vocabulary.logits(out.hidden_BTD)
        if packed is None:
            target_probs_NV = law_probs(logits, law).reshape(-1, logits.shape[-1])
            first_B, features_BTE = jnp.arange(batch) * (block + 1), out.features_BTE
        else:
            target_probs_NV = law_probs(logits[0][:, None], law.rows(packed.row_N))[:, 0]
            first_B, features_BTE = packed.first_B, packed.unpack(out.features_BTE[0])
        laws = (proposal.tokens_BK, proposal.probs_BKV, target_probs_NV)
        accepted_B, next_probs_BV = judge(plan.rule, *laws, first_B, lengths_B, uniforms_BK)
        assert out.cache is not None
        return out.cache, features_BTE, accepted_B, sample(next_probs_BV, keys_for(_NEXT), law.draws)

    if len(plan.sizes) > 1:
        total = jnp.sum(jnp.where(guide.live_B, lengths_B + 1, 0))
        smallest = jnp.searchsorted(jnp.asarray(plan.sizes), total)
        cache, features_BTE, accepted_B, next_B = lax.switch(
            smallest, [lambda size=size: verify(size) for size in plan.sizes]
        )
    else:
        cache, features_BTE, accepted_B, next_B = verify(plan.sizes[0] if plan.sizes else None)

    # Commit: positions after the accepted prefix stay in the caches as scratch, overwritten by the next round.
    committed_BN = jnp.concatenate([proposal.tokens_BK, next_B[:, None]], axis=1)
    committed_BN = jnp.where(jnp.arange(block + 1) == accepted_B[:, None], next_B[:, None], committed_BN)
    draft = drafter.extend(draft, target.vocabulary, features_BTE, committed_BN, start_B, accepted_B + 1)
    state = replace(state, cache=cache, draft=draft, anchor_B=next_B, position_B=start_B + accepted_B + 1)
    return state, RoundOutput(
        tokens_BN=committed_BN,
        count_B=accepted_B + 1,
        verified_B=lengths_B,
        confidence_BK=confidence_BK,
        evidence_BKF=evidence_BKF,
    )
