"""Tools in chat rows: what a row offers, and what its assistant called, in the form that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parse_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The `tools` of a row: a list of functions, or the JSON text of one. ValueError when it is neither.

    A function without OpenAI's wrapping ({"type": "function", "function": ..}) gets it.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError:
            raise ValueError("`tools` is text that is not JSON") from None
    if not isinstance(value, Sequence):
        raise ValueError("`tools` is not a list of functions")
    tools = []
    for i, entry in enumerate(value):
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"`tools[{i}]` is no function with a `name`")
        tools.append({"type": "function", "function": dict(function)})
    return _encodable(tuple(tools), "tools")


def tool_fields(entry: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """What a message has beside its text: `tool_calls` of the assistant, `tool_call_id` and `name` of a result.

    ValueError when calls are not OpenAI's list of functions with `name` and `arguments`.
    """
    if role == "tool":
        names = ("tool_call_id", "name")
        return _encodable({name: entry[name] for name in names if isinstance(entry.get(name), str)}, where)
    calls = entry.get("tool_calls")
    if role != "assistant" or not calls:
        return {}
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"`{where}.tool_calls` is not a list")
    return _encodable({"tool_calls": [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]}, where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"`{where}` has no `function` with a `name`")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = _arguments(function.get("arguments"), where)
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(value: Any, where: str) -> Mapping[str, Any]:
    # OpenAI sends JSON text; templates write the object out themselves.
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError:
            raise ValueError(f"`{where}.function.arguments` is text that is not JSON") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"`{where}.function.arguments` is not an object")
    return value


def _encodable(value: Any, where: str) -> Any:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"`{where}` holds a value that JSON in UTF-8 cannot") from None
    return value
