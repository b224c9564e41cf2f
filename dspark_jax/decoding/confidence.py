"""From what a drafter knows of a draft before it is sampled to the probability that the target keeps it."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import Array, Float, pytree
from dspark_jax.drafters.base import Proposal

HEAD_ALONE, HEAD_AND_DRAFT = 1, 3
"""Features of an estimator: the confidence head's logit, or that and the draft law's log p1 and log p1 - log p2."""


@pytree
class Estimator:
    """c_k = sigmoid(weights_KF[k] . evidence_k + bias_K[k]).

    A sequential temperature (STS, section 3.2) is the weight 1 / T_k on the head's logit.
    """

    weights_KF: Float[Array, "K F"]
    bias_K: Float[Array, "K"]

    @classmethod
    def raw(cls, block: int, features: int = HEAD_ALONE) -> "Estimator":
        """The head's own word; `features` beyond the first are carried along with weight 0."""
        weights_KF = np.zeros((block, features), np.float32)
        weights_KF[:, :1] = 1
        return cls(weights_KF=jnp.asarray(weights_KF), bias_K=jnp.zeros(block))

    def evidence(self, proposal: Proposal) -> Float[Array, "B K F"]:
        """The features this estimator reads of each draft."""
        head_BK1 = proposal.logit_BK[..., None]
        if self.weights_KF.shape[1] == HEAD_ALONE:
            return head_BK1
        first, second = proposal.top_BK2[..., :1], proposal.top_BK2[..., 1:]
        # A drafter that never drafts most tokens may have no second.
        margin = jnp.where(jnp.isfinite(second), first - second, _WIDEST_MARGIN)
        return jnp.concatenate([head_BK1, first, jnp.minimum(margin, _WIDEST_MARGIN)], axis=-1)

    def __call__(self, evidence_BKF: Float[Array, "B K F"]) -> Float[Array, "B K"]:
        """c_k of the first drafts of a block, as many as there is evidence of."""
        drafts = evidence_BKF.shape[1]
        logit_BK = jnp.sum(evidence_BKF * self.weights_KF[:drafts], axis=-1) + self.bias_K[:drafts]
        return jax.nn.sigmoid(logit_BK)


_WIDEST_MARGIN = 30.0
