"""Conversations as token ids with the mask of what is learnt: the assistant's words and the tokens that end its turns.

The mask is found by rendering the chat template up to each answer and comparing token prefixes. It is never derived
from token values: in many tokenizers the padding token is also the one that ends a turn.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dspark_jax.data.chat import BadRow, Conversation
from dspark_jax.data.filters import CONTROL
from dspark_jax.data.generation import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """tokens [T] int32; loss_mask [T] bool, true where the token itself is to be predicted."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def supervise(
    conversation: Conversation, tokenizer: Tokenizer, *, stop_ids: frozenset[int], max_len: int
) -> Supervised:
    """The conversation in the template's tokens, cut at max_len.

    The end-of-turn token (the first of `stop_ids` after an answer begins) is learnt, what the template writes after
    it is not, and neither is the end of an answer that was cut. ValueError when the template rewrites earlier turns
    (its renderings are then no prefixes of each other), when an answer holds a stop token itself, or when no token is
    left to learn.
    """
    rows = conversation.as_rows()
    answers = [i for i, row in enumerate(rows) if row["role"] == "assistant"]
    if not answers:
        raise ValueError("the conversation has no assistant message, so there is nothing to learn")
    full = tokenizer.encode_chat(rows[: answers[-1] + 1], add_generation_prompt=False)
    mask = np.zeros(len(full), bool)
    spans = [_answer_span(rows, i, full, tokenizer, stop_ids) for i in answers]
    for (start, stop), following in zip(spans, [*(start for start, _ in spans[1:]), len(full)], strict=True):
        if stop > following:
            raise ValueError("an answer ends after the next one begins: the template is not understood")
        mask[start:stop] = True
    length = spans[-1][1]
    if conversation.finish == "length":
        length -= 1
    length = min(length, max_len)
    if not mask[:length].any():
        raise ValueError(f"no token of an answer is left within {max_len} tokens")
    return Supervised(tokens=np.asarray(full[:length], np.int32), loss_mask=mask[:length])


def supervise_all(
    conversations: Iterable[Conversation | BadRow], tokenizer: Tokenizer, *, stop_ids: frozenset[int], max_len: int
) -> Iterator[tuple[Conversation, Supervised] | BadRow]:
    """Each conversation with its tokens, in order; those that cannot be used come out as BadRow."""
    for conversation in conversations:
        if isinstance(conversation, BadRow):
            yield conversation
            continue
        try:
            supervised = supervise(conversation, tokenizer, stop_ids=stop_ids, max_len=max_len)
        except ValueError as error:
            where = conversation.where
            text = "\n".join(conversation.prompts)
            yield BadRow(error=f"{where}: {error}" if where else str(error), text=text, where=where)
        else:
            yield conversation, supervised


def _answer_span(
    rows: list[dict[str, str]], i: int, full: list[int], tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> tuple[int, int]:
    """Where answer i begins in `full` and where it ends, its end-of-turn token included."""
    content = rows[i]["content"]
    # The pattern spares ordinary text a second tokenisation.
    if CONTROL.search(content) and not stop_ids.isdisjoint(tokenizer.encode(content)):
        raise ValueError(f"message {i} holds a stop token as text, so where the answer ends is unclear")
    before = tokenizer.encode_chat(rows[:i], add_generation_prompt=True)
    start = len(before)
    if full[:start] != before:
        raise ValueError(
            f"the chat template does not render the messages before message {i} as a prefix of the whole (it "
            "rewrites earlier turns): use one row per answer"
        )
    stop = next((at for at in range(start, len(full)) if full[at] in stop_ids), None)
    if stop is None:
        raise ValueError(f"the chat template ends message {i} with none of the stop tokens {sorted(stop_ids)}")
    return start, stop + 1
