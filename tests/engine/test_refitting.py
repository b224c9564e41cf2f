"""Slots that learn: the engine's interface, and a new estimator whenever one is due."""

import numpy as np

from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.online import OnlineEstimator
from dspark_jax.decoding.slots import DecodeSlots, Sampling, SlotRound
from dspark_jax.engine.engine import Slots
from dspark_jax.engine.refitting import Guided, RefittingSlots


class Hopeless:
    """Slots with one request, whose drafts the target never keeps although the head is sure of them."""

    estimator = None
    free = 0
    calls = ()

    def step(self):
        evidence = tuple((4.0 + jitter, -0.1, 2.0) for jitter in np.random.default_rng(len(self.calls)).normal(size=2))
        self.calls += ("step",)
        return [SlotRound(0, (1,), proposed=2, verified=2, accepted=0, confidence=(0.98, 0.98), evidence=evidence)]

    def admit_many(self, prompts, samplings):
        self.calls += ("admit",)
        return [0]

    def release(self, handle):
        self.calls += ("release",)

    def warm_up(self):
        self.calls += ("warm_up",)


def test_the_estimator_follows_what_is_served():
    slots, online = Hopeless(), OnlineEstimator(Fitted.tempered(np.ones(2)), every=50)
    refitting = RefittingSlots(slots, online)
    start = slots.estimator
    assert start.weights_KF.tolist() == [[1, 0, 0]] * 2, "all evidence is asked for from the start"
    refitting.warm_up()
    assert refitting.admit_many([[5]], [Sampling()]) == [0]
    for _ in range(49):
        rounds = refitting.step()
        assert slots.estimator is start
    assert rounds[0].tokens == (1,)
    refitting.step()
    refitting.release(0)
    assert slots.calls == ("warm_up", "admit", *["step"] * 50, "release")
    first, second = slots.estimator.weights_KF @ np.array([4.0, -0.1, 2.0]) + slots.estimator.bias_K
    assert first < 2.5, "from 98 % on the way to never"
    assert second == 4, "no second draft was reached"


def test_slots_fit_both_interfaces(tiny_target, tiny_drafter):
    slots = DecodeSlots(tiny_target, tiny_drafter, max_batch=2, max_len=120)
    assert isinstance(slots, Guided)
    refitting = RefittingSlots(slots, OnlineEstimator(Fitted.tempered(np.ones(tiny_drafter.block_size))))
    assert isinstance(refitting, Slots)
    assert slots.estimator.weights_KF.shape == (tiny_drafter.block_size, 3)
