"""The messages of a chat request, read into what chat templates take."""

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.fields import Json, array, record, refuse_unknown, string, wrong_type

# Templates know no developer: it is OpenAI's newer word for system.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What clients send back when they append a reply to the conversation; only empty values of the last four are taken.
_FIELDS = ("role", "content", "name", "tool_call_id", "annotations", "refusal", "audio", "tool_calls", "function_call")


def chat_messages(value: object) -> list[dict[str, str]]:
    """Role and text of every message; content parts are joined by line breaks, null is the empty text."""
    if value is None:
        raise Refusal("messages is missing: send at least one message.", param="messages", code="missing_field")
    messages = array(value, "messages")
    if not messages:
        raise Refusal("messages is empty: send at least one message.", param="messages", code="invalid_value")
    return [_message(record(message, f"messages[{i}]"), f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Json, where: str) -> dict[str, str]:
    refuse_unknown(message, _FIELDS, where=f"{where}.")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            string(message[name], f"{where}.{name}")
    for name in ("audio", "tool_calls", "function_call", "refusal"):
        if message.get(name):
            text = f"{where}.{name} is not supported: this server neither calls tools nor reads anything but text."
            raise Refusal(text, param=f"{where}.{name}", code="unsupported_field")
    if message.get("role") is None:
        raise Refusal(f"{where}.role is missing.", param=f"{where}.role", code="missing_field")
    role = string(message["role"], f"{where}.role")
    if role not in _ROLES:
        text = f"{where}.role is {role[:60]!r}, but must be one of {', '.join(_ROLES)}."
        raise Refusal(text, param=f"{where}.role", code="invalid_value")
    return {"role": _ROLES[role], "content": _content(message.get("content"), role, f"{where}.content")}


def _content(value: object, role: str, where: str) -> str:
    if isinstance(value, list):
        parts = [_part(record(part, f"{where}[{i}]"), f"{where}[{i}]") for i, part in enumerate(value)]
        return "\n".join(parts)
    if value is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(value, str):
        raise wrong_type(where, "a string or an array of text parts", value)
    return string(value, where)


def _part(part: Json, where: str) -> str:
    if part.get("type") != "text":
        text = f"{where}.type must be text: this model reads nothing else."
        raise Refusal(text, param=f"{where}.type", code="invalid_value")
    refuse_unknown(part, ("type", "text"), where=f"{where}.")
    return string(part.get("text"), f"{where}.text")
