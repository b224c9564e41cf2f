"""Conversations as token ids with the mask of what is learnt: the assistant's words, its calls of tools, and the tokens
that end its turns.

The mask is found by rendering the chat template up to each answer and comparing token prefixes. It is never derived
from token values: in many tokenizers the padding token is also the one that ends a turn.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dspark_jax.data.chat import BadRow, Conversation, Message
from dspark_jax.data.filters import CONTROL
from dspark_jax.data.generation import BatchTokenizer, Tokenizer

_GROUP = 512


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
    whole, *befores = _renderings(conversation)
    full = tokenizer.encode_chat(whole, False, conversation.tools)
    prefixes = [tokenizer.encode_chat(rows, True, conversation.tools) for rows in befores]
    return _masked(conversation, full, prefixes, tokenizer, stop_ids, max_len)


def supervise_all(
    conversations: Iterable[Conversation | BadRow], tokenizer: Tokenizer, *, stop_ids: frozenset[int], max_len: int
) -> Iterator[tuple[Conversation, Supervised] | BadRow]:
    """Each conversation as `supervise` has it, in order, encoded many at a time when the tokenizer can.

    Those that cannot be used come out as BadRow.
    """
    waiting = iter(conversations)
    while group := list(islice(waiting, _GROUP)):
        for conversation, found in zip(group, _supervise_group(group, tokenizer, stop_ids, max_len), strict=True):
            if isinstance(conversation, Conversation) and isinstance(found, Supervised):
                yield conversation, found
            elif isinstance(found, BadRow):
                yield found


def _supervise_group(
    group: list[Conversation | BadRow], tokenizer: Tokenizer, stop_ids: frozenset[int], max_len: int
) -> Iterator[Supervised | BadRow]:
    encoded = _encode_together(group, tokenizer)
    for i, conversation in enumerate(group):
        if isinstance(conversation, BadRow):
            yield conversation
            continue
        try:
            if i in encoded:
                full, *prefixes = encoded[i]
                yield _masked(conversation, full, prefixes, tokenizer, stop_ids, max_len)
            else:
                yield supervise(conversation, tokenizer, stop_ids=stop_ids, max_len=max_len)
        except ValueError as error:
            where = conversation.where
            text = "\n".join(conversation.prompts)
            yield BadRow(error=f"{where}: {error}" if where else str(error), text=text, where=where)


def _encode_together(group: list[Conversation | BadRow], tokenizer: Tokenizer) -> dict[int, list[list[int]]]:
    """The ids of every rendering of the group's conversations, by place; nothing where that has to go one by one."""
    if not isinstance(tokenizer, BatchTokenizer):
        return {}
    try:
        # A batch has one list of tools, conversations have their own.
        plain = {i: row for i, row in enumerate(group) if isinstance(row, Conversation) and not row.uses_tools}
        renderings = {i: _renderings(row) for i, row in plain.items()}
        wholes = tokenizer.encode_chats([each[0] for each in renderings.values()], add_generation_prompt=False)
        befores = iter(
            tokenizer.encode_chats(
                [rows for each in renderings.values() for rows in each[1:]], add_generation_prompt=True
            )
        )
    except ValueError:
        # One conversation that cannot be rendered spoils the batch; alone, it gets its own sentence.
        return {}
    return {
        i: [whole, *islice(befores, len(each) - 1)] for (i, each), whole in zip(renderings.items(), wholes, strict=True)
    }


def _renderings(conversation: Conversation) -> list[list[dict[str, Any]]]:
    """What is rendered: all messages up to the last answer, then those before each answer."""
    rows = conversation.as_rows()
    answers = [i for i, row in enumerate(rows) if row["role"] == "assistant"]
    if not answers:
        raise ValueError("the conversation has no assistant message, so there is nothing to learn")
    return [rows[: answers[-1] + 1], *(rows[:i] for i in answers)]


def _written(answer: Message) -> str:
    return f"{answer.content}{json.dumps(answer.extra, ensure_ascii=False)}" if answer.extra else answer.content


def _masked(
    conversation: Conversation,
    full: list[int],
    prefixes: list[list[int]],
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
    max_len: int,
) -> Supervised:
    answers = [_written(message) for message in conversation.messages if message.role == "assistant"]
    mask = np.zeros(len(full), bool)
    stop = 0
    for number, (answer, before) in enumerate(zip(answers, prefixes, strict=True), start=1):
        # The pattern spares ordinary text a second tokenisation.
        if CONTROL.search(answer) and not stop_ids.isdisjoint(tokenizer.encode(answer)):
            raise ValueError(f"answer {number} holds a stop token as text, so where it ends is unclear")
        start = len(before)
        if full[:start] != before or start < stop:
            raise ValueError(
                f"the chat template does not render the messages before answer {number} as a prefix of the whole (it "
                "rewrites earlier turns): use one row per answer"
            )
        stop = next((at + 1 for at in range(start, len(full)) if full[at] in stop_ids), 0)
        if not stop:
            raise ValueError(f"the chat template ends answer {number} with none of the stop tokens {sorted(stop_ids)}")
        mask[start:stop] = True
    length = min(stop - (conversation.finish == "length"), max_len)
    if not mask[:length].any():
        raise ValueError(f"no token of an answer is left within {max_len} tokens")
    return Supervised(tokens=np.asarray(full[:length], np.int32), loss_mask=mask[:length])
