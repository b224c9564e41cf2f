"""What rounds are told beside their state, kept on the device for as long as it is true."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array
from dspark_jax.decoding.confidence import Estimator
from dspark_jax.decoding.outlook import Outlooks
from dspark_jax.decoding.planner import Planner
from dspark_jax.decoding.scheduler import Guide


class Guides:
    """Guides of one planner's rounds. All have its estimator, though not all confidences are looked at: asking for them
    costs next to nothing, while two programs that take turns cost a GPU's host as much as a third of a small round.

    Whoever changes which requests are live says so by `changed`.
    """

    def __init__(self, planner: Planner, estimator: Estimator):
        self.estimator = estimator
        self._planner = planner
        self._rates: dict[tuple[int, int], Array | None] = {}
        self._live: tuple[Array, Array] | None = None

    def changed(self) -> None:
        """Requests came, left or moved."""
        self._live = None

    def of(self, outlooks: Outlooks, span: int) -> Guide:
        """For the requests that are live."""
        if self._live is None:
            # A copy: the round may still be running when a request leaves.
            self._live = jnp.array(outlooks.live_B), jnp.asarray(outlooks.live_B & outlooks.pinned_B)
        return self._guide(len(outlooks.live_B), span, *self._live)

    def empty(self, rows: int, span: int) -> Guide:
        """For a state without requests."""
        nobody_B = jnp.zeros(rows, bool)
        return self._guide(rows, span, nobody_B, nobody_B)

    def _guide(self, rows: int, span: int, live_B: Array, pinned_B: Array) -> Guide:
        if (rows, span) not in self._rates:
            rates = self._planner.rates(rows, span)
            self._rates[rows, span] = None if rates is None else jnp.asarray(rates)
        return Guide(estimator=self.estimator, live_B=live_B, pinned_B=pinned_B, rates_N=self._rates[rows, span])
