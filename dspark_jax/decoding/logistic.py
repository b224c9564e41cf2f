"""Logistic regression with a prior, small enough to be run between two rounds of a server."""

import numpy as np
from jaxtyping import Bool, Float

_NEWTON_STEPS = 50


def sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    # By tanh, which overflows nowhere.
    return 0.5 * (1 + np.tanh(0.5 * x))


def logistic_regression(
    evidence_BF: Float[np.ndarray, "B F"],
    kept_B: Bool[np.ndarray, "B"],
    *,
    prior: tuple[Float[np.ndarray, "F"], float],
    ridge: float,
    weight_B: Float[np.ndarray, "B"] | None = None,
) -> tuple[Float[np.ndarray, "F"], float]:
    """(weights, bias) by Newton's method on the summed log loss, plus ridge / 2 of the squared distance to the prior.

    Evidence is standardised first, so that one ridge suits every feature; one that never varies gets no weight.
    """
    weight_B = np.ones(len(kept_B)) if weight_B is None else weight_B
    mean_F = np.average(evidence_BF, axis=0, weights=weight_B)
    scale_F = np.sqrt(np.average((evidence_BF - mean_F) ** 2, axis=0, weights=weight_B))
    varies_F = scale_F > 1e-9
    scale_F = np.where(varies_F, scale_F, 1.0)
    x_BG = np.column_stack([np.where(varies_F, (evidence_BF - mean_F) / scale_F, 0.0), np.ones(len(kept_B))])
    prior_F = np.where(varies_F, prior[0], 0.0)
    prior_G = np.append(prior_F * scale_F, prior[1] + prior_F @ mean_F)
    fitted_G = _newton(x_BG, kept_B, weight_B, prior_G, ridge)
    weights_F = np.where(varies_F, fitted_G[:-1] / scale_F, 0.0)
    return weights_F, float(fitted_G[-1] - weights_F @ mean_F)


def _newton(
    x_BG: np.ndarray, kept_B: np.ndarray, weight_B: np.ndarray, prior_G: np.ndarray, ridge: float
) -> np.ndarray:
    def loss(at_G: np.ndarray) -> float:
        logit_B = x_BG @ at_G
        return float(
            weight_B @ (np.logaddexp(0, logit_B) - kept_B * logit_B) + ridge / 2 * np.sum((at_G - prior_G) ** 2)
        )

    at_G = prior_G
    for _ in range(_NEWTON_STEPS):
        probability_B = sigmoid(x_BG @ at_G)
        gradient_G = x_BG.T @ (weight_B * (probability_B - kept_B)) + ridge * (at_G - prior_G)
        curvature_B = weight_B * probability_B * (1 - probability_B)
        hessian_GG = (x_BG.T * curvature_B) @ x_BG + ridge * np.eye(len(at_G))
        step_G = np.linalg.solve(hessian_GG, gradient_G)
        # A full step may overshoot where most probabilities are near 0 or 1.
        size = 1.0
        while size > 1e-6 and loss(at_G - size * step_G) > loss(at_G):
            size /= 2
        at_G = at_G - size * step_G
        if np.max(np.abs(step_G)) < 1e-8:
            break
    return at_G
