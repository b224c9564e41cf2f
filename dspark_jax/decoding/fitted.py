"""Estimators of acceptance on the host, in float64: what is fitted, measured and written to files."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dspark_jax.decoding.confidence import HEAD_ALONE, Estimator
from dspark_jax.decoding.logistic import sigmoid


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """c_k = sigmoid(weights_KF[k] . evidence_k + bias_K[k]); with one feature it reads the head's logit alone."""

    weights_KF: Float[np.ndarray, "K F"]
    bias_K: Float[np.ndarray, "K"]

    @classmethod
    def tempered(cls, temperature_K: Float[np.ndarray, "K"]) -> "Fitted":
        """The head's logit divided by a temperature a position; ones give the head itself."""
        return cls(weights_KF=1 / np.tile(temperature_K[:, None], HEAD_ALONE), bias_K=np.zeros(len(temperature_K)))

    @property
    def block_size(self) -> int:
        return len(self.bias_K)

    def logits(self, evidence_BKF: Float[np.ndarray, "B K G"]) -> Float[np.ndarray, "B K"]:
        """Of evidence that has at least the features that are read."""
        features = self.weights_KF.shape[1]
        return np.einsum("bkf,kf->bk", evidence_BKF[..., :features], self.weights_KF) + self.bias_K

    def confidences(self, evidence_BKF: Float[np.ndarray, "B K G"]) -> Float[np.ndarray, "B K"]:
        """c_k."""
        return sigmoid(self.logits(evidence_BKF))

    def on_device(self) -> Estimator:
        """For the slots, in float32."""
        return Estimator(
            weights_KF=jnp.asarray(self.weights_KF, jnp.float32), bias_K=jnp.asarray(self.bias_K, jnp.float32)
        )
