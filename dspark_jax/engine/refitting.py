"""Slots whose estimator goes on learning from the rounds they run."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dspark_jax.decoding.confidence import Estimator
from dspark_jax.decoding.online import OnlineEstimator
from dspark_jax.decoding.slots import Sampling, SlotRound
from dspark_jax.engine.engine import Slots


@runtime_checkable
class Guided(Slots, Protocol):
    """Slots whose rounds are guided by an estimator that may be replaced between them."""

    @property
    def estimator(self) -> Estimator: ...

    @estimator.setter
    def estimator(self, estimator: Estimator) -> None: ...


class RefittingSlots:
    """Slots as the engine sees them. Between two rounds, whenever a fit is due, they get the new one."""

    def __init__(self, slots: Guided, online: OnlineEstimator):
        self._slots, self._online = slots, online
        # Before anything is compiled: from here on every round brings all evidence.
        slots.estimator = online.refit().on_device()

    @property
    def free(self) -> int:
        return self._slots.free

    def admit_many(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[int]:
        return self._slots.admit_many(prompts, samplings)

    def release(self, handle: int) -> None:
        self._slots.release(handle)

    def step(self) -> list[SlotRound]:
        rounds = self._slots.step()
        self._online.observe(rounds)
        if self._online.due:
            self._slots.estimator = self._online.refit().on_device()
        return rounds

    def warm_up(self) -> None:
        self._slots.warm_up()
