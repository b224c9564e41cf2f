"""Validated requests: what the engine is asked to do, with nothing of HTTP left in it."""

import hashlib
import secrets
from dataclasses import dataclass

from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.errors import Refusal

SEED_BITS = 31


@dataclass(frozen=True, kw_only=True)
class RequestLaw:
    """The law every choice of a request is drawn from; temperature 0 is greedy, top_k 0 and top_p 1 are off.

    `seed=None` asks for fresh randomness.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """One choice: the work of one slot. `max_tokens` fits the context behind the prompt."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """`n` choices for each of the prompts; `max_tokens=None` means the rest of the context."""

    prompts: tuple[tuple[int, ...], ...]
    law: RequestLaw
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once however many choices it gets."""
        return sum(len(prompt) for prompt in self.prompts)

    def choices(self, max_len: int) -> tuple[ChoiceRequest, ...]:
        """The choices in the order of their index, prompt by prompt.

        A prompt's j-th choice draws from (seed, j), so a prompt gives the same text alone and in a list.
        Raises `Refusal` where prompt and answer do not fit in `max_len` positions.
        """
        seed = secrets.randbits(SEED_BITS) if self.law.seed is None else self.law.seed
        choices: list[ChoiceRequest] = []
        for prompt in self.prompts:
            budget = answer_budget(len(prompt), self.max_tokens, max_len)
            for j in range(self.n):
                sampling = Sampling(
                    temperature=self.law.temperature,
                    top_k=self.law.top_k,
                    top_p=self.law.top_p,
                    seed=choice_seed(seed, j),
                    # A text that was asked for by its seed must not depend on who else is served.
                    pinned=self.law.seed is not None and self.law.temperature > 0,
                )
                choices.append(
                    ChoiceRequest(
                        index=len(choices), prompt=prompt, sampling=sampling, max_tokens=budget, stop=self.stop
                    )
                )
        return tuple(choices)


def choice_seed(seed: int, j: int) -> int:
    """A seed in [0, 2**31) for the j-th choice of a request.

    A single choice with a seed in that range keeps it, so that a served request can be repeated offline.
    """
    if j == 0 and 0 <= seed < 2**SEED_BITS:
        return seed
    digest = hashlib.blake2b(f"{seed}/{j}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - SEED_BITS)


def answer_budget(prompt_tokens: int, max_tokens: int | None, max_len: int) -> int:
    """How many tokens the answer may have; `Refusal` (context_length_exceeded) where they do not fit."""
    room = max_len - prompt_tokens
    if room < 1:
        raise _too_long(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer; shorten the prompt", max_len
        )
    if max_tokens is not None and max_tokens > room:
        raise _too_long(
            f"{prompt_tokens + max_tokens} were requested ({prompt_tokens} in the prompt, {max_tokens} for the "
            f"answer); shorten the prompt or ask for at most {room} tokens",
            max_len,
        )
    return room if max_tokens is None else max_tokens


def _too_long(what: str, max_len: int) -> Refusal:
    message = f"This server's context holds {max_len} tokens, but {what}."
    return Refusal(message, code="context_length_exceeded")
