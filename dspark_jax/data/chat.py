"""Conversations: the one type every row of chat data becomes, and the reader of the three JSONL formats.

Rows are OpenAI (`messages`), ShareGPT (`conversations` of from/value) or bare prompts (`turns`, the user's messages).
The first two may use tools: `tools` of the row, `tool_calls` of an assistant message, results in messages of their own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dspark_jax.data.tools import parse_tools, tool_fields

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """`extra` is what a template takes beside the text: `tool_calls`, `tool_call_id`, `name`."""

    role: Role
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """An optional system message, then user turns, each followed by its answer unless it is still to be answered.

    Between a turn and its answer there may be calls of tools, by the assistant, and their results. `tools` are offered.
    `finish` is "length" when the last answer was cut, so that its end-of-turn token is nothing to learn from.
    `where` is the file and line it was read from, for messages to people.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    finish: Literal["stop", "length"] = "stop"
    source: str = ""
    where: str = ""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The user's messages."""
        return tuple(message.content for message in self.messages if message.role == "user")

    @property
    def system(self) -> str | None:
        return self.messages[0].content if self.messages[0].role == "system" else None

    @property
    def uses_tools(self) -> bool:
        """Whether tools are offered, called or heard."""
        return bool(self.tools) or any(message.role == "tool" or message.extra for message in self.messages)

    def as_rows(self) -> list[dict[str, Any]]:
        """The messages as chat templates and JSON want them."""
        return [{"role": message.role, "content": message.content, **message.extra} for message in self.messages]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a JSONL file: the parsed value, the text it was parsed from, and file:line."""

    value: Any
    text: str
    where: str


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that could not be used: one sentence that names the file and line, and the row's own text."""

    error: str
    text: str
    where: str = ""


def parse_conversation(row: Any, where: str = "") -> Conversation:
    """The conversation in one parsed JSON row. ValueError, one sentence, when it holds none."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a JSON object, not {_kind(row)}")
    if "messages" in row:
        messages = _messages(row["messages"], "messages", role="role", content="content")
    elif "conversations" in row:
        messages = _messages(row["conversations"], "conversations", role="from", content="value")
    elif "turns" in row:
        turns = _sequence(row["turns"], "turns")
        messages = [Message(role="user", content=_text(turn, f"turns[{i}]")) for i, turn in enumerate(turns)]
    else:
        raise ValueError("the row has none of `messages`, `conversations` and `turns`")
    if row.get("system") is not None and (not messages or messages[0].role != "system"):
        messages = [Message(role="system", content=_text(row["system"], "system")), *messages]
    _check_order(messages)
    finish = row.get("finish", "stop")
    if finish not in ("stop", "length"):
        raise ValueError(f'`finish` is "stop" or "length", not {finish!r}')
    source = row.get("source")
    source = source if isinstance(source, str) else ""
    tools = parse_tools(row.get("tools"))
    return Conversation(messages=tuple(messages), tools=tools, finish=finish, source=source, where=where)


def read_rows(path: str | Path) -> Iterator[Row | BadRow]:
    """Every line of a JSONL file that is not blank, in order; one that is no JSON comes as a BadRow.

    ValueError for a folder or a parquet file, which are not read here.
    """
    if Path(path).is_dir() or Path(path).suffix == ".parquet":
        raise ValueError(
            f"{path} is not a JSONL file: `dspark data prepare --in {path} --out FILE` writes the prompts in it to one"
        )
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                text = line.decode("utf-8", errors="backslashreplace").strip()
                yield BadRow(error=f"{where}: the line is not UTF-8", text=text, where=where)
                continue
            if not text:
                continue
            try:
                value = json.loads(text, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                yield BadRow(error=f"{where}: the line is not JSON ({error})", text=text, where=where)
            else:
                yield Row(value=value, text=text, where=where)


def read_conversations(path: str | Path) -> Iterator[Conversation | BadRow]:
    """Every row of a chat JSONL file in order, bad ones as BadRow: only a file that cannot be read raises."""
    for row in read_rows(path):
        if isinstance(row, BadRow):
            yield row
            continue
        try:
            conversation = parse_conversation(row.value, row.where)
        except ValueError as error:
            yield BadRow(error=f"{row.where}: {error}", text=row.text, where=row.where)
        else:
            yield conversation


def _messages(value: Any, name: str, *, role: str, content: str) -> list[Message]:
    messages = []
    for i, entry in enumerate(_sequence(value, name)):
        where = f"{name}[{i}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"`{where}` is an object with `{role}` and `{content}`, not {_kind(entry)}")
        said = entry.get(role)
        if not isinstance(said, str) or said not in _ROLES:
            raise ValueError(f"`{where}.{role}` is {said!r}, which is none of {', '.join(_ROLES)}")
        extra = tool_fields(entry, _ROLES[said], where)
        wordless = _ROLES[said] == "tool" or "tool_calls" in extra
        text = _text(entry.get(content), f"{where}.{content}", may_be_empty=wordless)
        messages.append(Message(role=_ROLES[said], content=text, extra=extra))
    return messages


def _check_order(messages: Sequence[Message]) -> None:
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns or turns[0].role != "user":
        raise ValueError("the first message after the system message is not the user's")
    for earlier, later in pairwise(turns):
        if later.role == "system":
            raise ValueError("a system message comes after the first message")
        if earlier.role == later.role == "assistant":
            raise ValueError("two assistant messages follow each other")
        if earlier.role == "user" and later.role == "tool":
            raise ValueError("a tool's result follows a user message, so nobody called the tool")
        if earlier.role == "tool" and later.role == "user":
            raise ValueError("a user message follows a tool's result that no assistant message answers")
    answers = sum(turn.role == "assistant" for turn in turns)
    if answers and any(a.role == b.role == "user" for a, b in pairwise(turns)):
        raise ValueError("two user messages follow each other although others are answered")


def _text(value: Any, where: str, *, may_be_empty: bool = False) -> str:
    if value is None and may_be_empty:
        return ""
    if isinstance(value, list):
        value = _joined_parts(value, where)
    if not isinstance(value, str):
        raise ValueError(f"`{where}` is text, not {_kind(value)}")
    if not value.strip() and not may_be_empty:
        raise ValueError(f"`{where}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{where}` holds half of a surrogate pair, which no tokenizer takes") from None
    return value


def _joined_parts(parts: list[Any], where: str) -> str:
    """The text of OpenAI's list-of-parts content. ValueError for a part that is not text."""
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"`{where}` has a part that is not text")
        texts.append(part["text"])
    return "".join(texts)


def _sequence(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is a list, not {_kind(value)}")
    return value


def _no_constant(name: str) -> Any:
    # Python's own extension: no other reader takes it.
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)
