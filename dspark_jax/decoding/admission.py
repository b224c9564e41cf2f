"""What a request asks for, and how requests that join together are taken in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.buckets import prefill_chunks, request_keys
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.round import DecodeState
from dspark_jax.ops.sampling import Draws, SamplingLaw


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law one request asked for. Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary.

    `pinned`: all its drafts are verified whatever the load, so that its seed says the same alone and among others.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    pinned: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"sampling: needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, got {self}")


def known_draws(laws: Sequence[Sampling]) -> Draws:
    """The narrowest that is true of all these laws."""
    if all(law.temperature == 0 for law in laws):
        return Draws.GREEDY
    return Draws.PLAIN if all(law.top_k == 0 and law.top_p == 1 for law in laws) else Draws.FILTERED


def prefilled(
    programs: Programs, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], *, size: int, span: int
) -> DecodeState:
    """A state of `size` rows, these requests first: everything before each anchor taken in, the anchor the prompt's
    last token."""
    padding = size - len(prompts)
    prompts = [*prompts, *[np.zeros(1, np.int32)] * padding]
    samplings = [*samplings, *[Sampling()] * padding]
    state = programs.empty(size, span)
    lengths = [len(prompt) - 1 for prompt in prompts]
    for start_B, chunk in prefill_chunks(lengths, span, programs.passes):
        window_BN = np.zeros((size, chunk + 1), np.int32)
        for row, (prompt, start) in enumerate(zip(prompts, start_B, strict=True)):
            piece = prompt[start : start + chunk + 1]
            window_BN[row, : len(piece)] = piece
        count_B = np.minimum(np.asarray(lengths, np.int32) - start_B, chunk)
        state = programs.prefill(state, window_BN, start_B, count_B)
    return replace(
        state,
        anchor_B=jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32),
        position_B=jnp.asarray(lengths, jnp.int32),
        law=SamplingLaw(
            temperature_B=jnp.asarray([s.temperature for s in samplings], jnp.float32),
            top_k_B=jnp.asarray([s.top_k for s in samplings], jnp.int32),
            top_p_B=jnp.asarray([s.top_p for s in samplings], jnp.float32),
            keys_B=request_keys([s.seed for s in samplings]),
        ),
    )
