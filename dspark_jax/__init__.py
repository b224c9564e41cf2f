"""DSpark (arXiv 2607.05147) in JAX: train, calibrate and serve a drafter for lossless speculative decoding."""
