"""Whatever decides how much is verified, texts stay the same, work falls, and nothing compiles after the warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.confidence import HEAD_AND_DRAFT, Estimator
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.planner import two_step_plans
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import RoundPlan, decode_round, init_state
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Guide, Threshold, TwoStep
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats

BLOCK = 2


def curve(seconds, *, rows=(1, 2, 4, 8), span=256):
    """A step curve: seconds(tokens, drafts) at every shape."""
    shapes = [
        Shape(count, span, tokens, plan.drafts)
        for count in rows
        for plan, tokens in two_step_plans(count, BLOCK, TwoStep(), Rule.TOKEN)
    ]
    return StepCurve({shape: seconds(shape.tokens, shape.drafts) for shape in shapes})


MILD = curve(lambda tokens, drafts: 8 + tokens / 3 + drafts / 4)
POLICIES = {
    "none": FixedLength(length=0),
    "one": FixedLength(length=1),
    "all": FixedLength(),
    "threshold": Threshold(confidence=0.5),
    "early stop": EarlyStop(),
    "two-step": TwoStep(),
}


def slots_of(models, policy, rule=Rule.TOKEN, *, curve=MILD, elastic=False, max_batch=8):
    """Slots that read all there is to read, so that rounds with and without reading differ."""
    return DecodeSlots(
        *models,
        max_batch=max_batch,
        max_len=60,
        policy=policy,
        curve=curve,
        estimator=Estimator.raw(BLOCK, HEAD_AND_DRAFT),
        rule=rule,
        elastic=elastic,
    )


def jobs():
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, 16, length).tolist()) for length in (1, 9, 4, 17, 2, 30, 3, 6, 11, 5)]
    return [
        Job(prompt=prompt, sampling=Sampling(), max_new_tokens=12 + 3 * i, tag=i) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("name", "rule"), [*((name, Rule.TOKEN) for name in POLICIES), ("all", Rule.BLOCK)])
def test_greedy_text_is_the_targets_own(thin, is_greedy, oracle_of, name, rule):
    """With a drafter that is right half of the time."""
    target, drafter = thin[0], oracle_of(thin[0], block=BLOCK, shift=None)
    completions = list(generate(slots_of((target, drafter), POLICIES[name], rule), jobs()))
    assert is_greedy(target, [c.job.prompt for c in completions], [c.tokens for c in completions])
    stats = sum((c.stats for c in completions), DecodeStats())
    if name == "none":
        assert stats.proposed == stats.verified == 0
    else:
        assert 0 < stats.accepted < stats.verified <= stats.proposed
    if name in ("threshold", "early stop", "two-step"):
        assert stats.verified < stats.proposed


def test_one_program_verifies_the_same_packed_and_whole(thin):
    """Bucket edges and beyond: lengths of 8 rows at random, some rows dead; thousands of draws."""
    target, drafter = thin
    sizes = (8, 12, 24)
    whole, packed = (RoundPlan(policy=Threshold(confidence=0.5), sizes=sizes) for sizes in ((), sizes))
    guide = Guide.unguided(8, BLOCK).replace(live_B=jnp.arange(8) != 5)
    state = init_state(target, drafter, 8, 64, jnp.float32)
    state = state.replace(law=state.law.replace(temperature_B=jnp.linspace(0, 1.5, 8)))
    step = jax.jit(decode_round, static_argnums=2)
    totals = set()
    for _ in range(8):
        (state, one), (_, other) = (step(target, drafter, plan, state, guide) for plan in (packed, whole))
        live = np.arange(8) != 5
        for name in ("count_B", "verified_B"):
            np.testing.assert_array_equal(getattr(one, name)[live], getattr(other, name)[live])
        for row in np.flatnonzero(live):
            count = int(one.count_B[row])
            assert one.tokens_BN[row, :count].tolist() == other.tokens_BN[row, :count].tolist()
        totals.add(int(np.sum(one.verified_B[live] + 1)))
    assert len({np.searchsorted(sizes, total) for total in totals}) > 1


def test_what_warms_up_teaches_the_scheduler_nothing(thin):
    """It knows no request yet: whatever the guess, the first round drafts whole blocks to learn from."""
    dear = curve(lambda tokens, drafts: 1.0 + 9 * (drafts > 0))
    slots = slots_of(thin, TwoStep(), curve=dear, max_batch=2)
    slots.warm_up()
    slots.admit((1, 2, 3), Sampling(temperature=1.0))
    rounds = [out for _ in range(4) for out in slots.step()]
    assert [out.proposed for out in rounds] == [BLOCK, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "elastic"),
    [
        ("two-step", False),
        pytest.param("two-step", True, marks=pytest.mark.slow),
        pytest.param("early stop", False, marks=pytest.mark.slow),
    ],
)
def test_a_thousand_rounds_compile_nothing_after_the_warm_up(thin, name, elastic):
    slots = slots_of(thin, POLICIES[name], max_batch=2 if elastic else 4, elastic=elastic)
    slots.warm_up()
    before, rng, verified = slots.programs.compiled_rounds, np.random.default_rng(0), set()
    for _ in range(1000):
        if slots.free and rng.random() < 0.4:
            slots.admit(
                [int(rng.integers(16))], Sampling(temperature=float(rng.choice([0, 1.0])), seed=int(rng.integers(99)))
            )
        live = len(slots.live)
        outs = slots.step()
        verified.add((live, sum(out.verified for out in outs)))
        # Whether or not something is learnt from a round: no second program takes turns with the first.
        assert {out.evidence.shape[-1] for out in outs} <= {HEAD_AND_DRAFT}
        for handle in slots.live:
            if rng.random() < 0.12:
                slots.release(handle)
    assert slots.programs.compiled_rounds == before
    assert len(verified) > 4


def test_d_29_less_is_verified_the_more_requests_there_are(thin, oracle_of):
    """Verification tokens of a request fall with load where each one costs."""
    perfect = oracle_of(thin[0], block=BLOCK, shift=0)
    pair = thin[0], perfect.replace(confidence_KV=jnp.full_like(perfect.confidence_KV, 0.6))
    costly = curve(lambda tokens, drafts: 40.0 + 4 * tokens)
    means = []
    for requests in (2, 6, 8):
        slots = slots_of(pair, TwoStep(), curve=costly)
        slots.admit_many([[token] for token in range(requests)], [Sampling()] * requests)
        outs = [out for _ in range(8) for out in slots.step()]
        means.append(np.mean([out.verified for out in outs]))
    assert means[0] > means[1] > means[2] > 0


def test_a_pinned_request_says_the_same_alone_and_in_any_crowd(thin, oracle_of, alone):
    pair = thin[0], oracle_of(thin[0], block=BLOCK, shift=None)
    law = Sampling(temperature=1.0, seed=5, pinned=True)
    texts = []
    for others in (0, 3, 7):
        slots = slots_of(pair, TwoStep())
        slots.admit_many(
            [[token] for token in range(others)], [Sampling(temperature=1.0, seed=n) for n in range(others)]
        )
        handle, text, lengths = slots.admit([1, 2, 3], law), [], set()
        while len(text) < 30:
            for out in slots.step():
                if out.handle == handle:
                    text += out.tokens
                    assert out.verified == BLOCK
                else:
                    lengths.add(out.verified)
        assert others < 7 or min(lengths) < BLOCK
        texts.append(text[:30])
    assert texts[0] == texts[1] == texts[2]


def test_a_policy_that_needs_a_curve_says_so(thin):
    for policy in (EarlyStop(), TwoStep()):
        with pytest.raises(ValueError, match="needs a step curve"):
            DecodeSlots(*thin, max_batch=1, max_len=60, policy=policy)
