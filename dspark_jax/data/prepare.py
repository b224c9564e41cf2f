"""Rows of other people's chat data as prompts for `regenerate`, each of them once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dspark_jax.data.chat import BadRow, Conversation, Row, parse_conversation
from dspark_jax.data.dedup import Deduplicator


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`row` is what to write; `first` is the user's first message, by which training and validation are split."""

    row: dict[str, Any]
    first: str


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """A row whose user messages are those of an earlier one, or nearly."""

    where: str


def prepare(
    rows: Iterable[Row | BadRow], deduplicator: Deduplicator, *, source: str
) -> Iterator[Prompt | Duplicate | BadRow]:
    """What becomes of each row, in order; `source` is written where a row names none.

    Of a conversation its system message and the user's are kept, to be answered anew, and all of it where tools are
    used, since what tools said cannot be had again.
    """
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        try:
            conversation = parse_conversation(row.value)
        except ValueError as error:
            yield BadRow(error=f"{row.where}: {error}", text=row.text, where=row.where)
            continue
        if deduplicator.is_new("\n".join(conversation.prompts)):
            kept = _kept(conversation) | {"source": conversation.source or source}
            yield Prompt(row=kept, first=conversation.prompts[0])
        else:
            yield Duplicate(where=row.where)


def _kept(conversation: Conversation) -> dict[str, Any]:
    if conversation.uses_tools:
        tools = list(conversation.tools)
        return {"messages": conversation.as_rows(), "tools": tools, "finish": conversation.finish}
    system = {} if conversation.system is None else {"system": conversation.system}
    return {"turns": list(conversation.prompts)} | system
