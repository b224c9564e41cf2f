"""The JSON bodies of /v1/chat/completions and /v1/completions, read into validated requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.fields import (
    Json,
    array,
    boolean,
    integer,
    kind_of,
    number,
    record,
    refuse_unknown,
    string,
    wrong_type,
)
from dspark_jax.engine.messages import chat_messages
from dspark_jax.engine.neutral import CHAT_NEUTRAL, COMPLETION_NEUTRAL, check_neutral, neutral_names
from dspark_jax.engine.request import ChoiceRequest, GenerationRequest, RequestLaw

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_MAX_STOPS = 4
_MAX_STOP_LENGTH = 1000

_LAW = ("temperature", "top_p", "top_k", "seed")
_COMMON = ("model", "stream", "stream_options", "max_tokens", "stop", "n", *_LAW)
_CHAT = frozenset((*_COMMON, "messages", "max_completion_tokens")) | neutral_names(CHAT_NEUTRAL)
_COMPLETION = frozenset((*_COMMON, "prompt")) | neutral_names(COMPLETION_NEUTRAL)


@runtime_checkable
class PromptEncoder(Protocol):
    """The part of a tokenizer that requests need."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]: ...

    def encode(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server has to offer, for checking requests against it."""

    name: str
    max_len: int
    vocab_size: int
    max_choices: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that can be served, and how its reply is wanted."""

    choices: tuple[ChoiceRequest, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool


def read_chat(body: Json, served: Served, encoder: PromptEncoder) -> Asked:
    """A body of /v1/chat/completions; `Refusal` where it cannot be honoured as it stands."""
    refuse_unknown(body, _CHAT)
    _check_model(body, served)
    check_neutral(body, CHAT_NEUTRAL)
    messages = chat_messages(body.get("messages"))
    limits = [integer(body, name, low=1, high=_INT32, default=None) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        message = "max_tokens and max_completion_tokens say different things: send only max_completion_tokens."
        raise Refusal(message, param="max_tokens", code="invalid_value")
    law, stop, n = _law(body), _stop(body), _n(body, served, prompts=1)
    stream, include_usage = _stream(body)
    try:
        prompt = tuple(encoder.encode_chat(messages))
    except ValueError as error:
        raise Refusal(f"The model's chat template refuses these messages: {error}", param="messages") from None
    request = GenerationRequest(
        prompts=(prompt,), law=law, max_tokens=limits[1] if limits[0] is None else limits[0], stop=stop, n=n
    )
    return _asked(request, served, stream, include_usage)


def read_completion(body: Json, served: Served, encoder: PromptEncoder) -> Asked:
    """A body of /v1/completions; `Refusal` where it cannot be honoured as it stands."""
    refuse_unknown(body, _COMPLETION)
    _check_model(body, served)
    check_neutral(body, COMPLETION_NEUTRAL)
    max_tokens = integer(body, "max_tokens", low=1, high=_INT32, default=None)
    prompts = _prompts(body.get("prompt"))
    law, stop, n = _law(body), _stop(body), _n(body, served, prompts=len(prompts))
    stream, include_usage = _stream(body)
    encoded = [_prompt_ids(prompt, served, encoder) for prompt in prompts]
    request = GenerationRequest(prompts=tuple(encoded), law=law, max_tokens=max_tokens, stop=stop, n=n)
    return _asked(request, served, stream, include_usage)


def check_name(name: str, served: Served) -> None:
    """404 for a model that is not the one served here."""
    if name != served.name:
        message = f"The model {name[:100]!r} is not served here; the one that is: {served.name!r}."
        raise Refusal(message, status=404, param="model", code="model_not_found")


def _asked(request: GenerationRequest, served: Served, stream: bool, include_usage: bool) -> Asked:
    return Asked(
        choices=request.choices(served.max_len),
        prompt_tokens=request.prompt_tokens,
        stream=stream,
        include_usage=include_usage,
    )


def _check_model(body: Json, served: Served) -> None:
    if body.get("model") is None:
        message = f"model is missing: send {served.name!r}."
        raise Refusal(message, param="model", code="missing_field")
    check_name(string(body["model"], "model"), served)


def _law(body: Json) -> RequestLaw:
    # vLLM's clients write "off" as -1, others as 0.
    top_k = integer(body, "top_k", low=-1, high=_INT32, default=0) or 0
    return RequestLaw(
        temperature=number(body, "temperature", low=0.0, high=2.0, default=1.0),
        top_p=number(body, "top_p", low=0.0, high=1.0, default=1.0, open_low=True),
        top_k=max(top_k, 0),
        seed=integer(body, "seed", low=-_INT64 - 1, high=_INT64, default=None),
    )


def _n(body: Json, served: Served, *, prompts: int) -> int:
    n = integer(body, "n", low=1, high=_INT32, default=1) or 1
    if n * prompts > served.max_choices:
        asked = f"n is {n}" if prompts == 1 else f"{prompts} prompts times n = {n} make {n * prompts} choices"
        message = f"{asked}, but this server holds at most {served.max_choices} at once (--max-batch and --max-queue)."
        raise Refusal(message, param="n" if n > 1 else "prompt", code="invalid_value")
    return n


def _stop(body: Json) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    if not isinstance(value, str | list):
        raise wrong_type("stop", "a string or an array of strings", value)
    words = [value] if isinstance(value, str) else value
    if len(words) > _MAX_STOPS:
        raise Refusal(
            f"stop holds {len(words)} strings; at most {_MAX_STOPS} are taken.", param="stop", code="invalid_value"
        )
    for i, word in enumerate(words):
        param = "stop" if isinstance(value, str) else f"stop[{i}]"
        if not 1 <= len(string(word, param)) <= _MAX_STOP_LENGTH:
            message = f"{param} must have from 1 to {_MAX_STOP_LENGTH} characters, but it has {len(word)}."
            raise Refusal(message, param=param, code="invalid_value")
    return tuple(words)


def _stream(body: Json) -> tuple[bool, bool]:
    stream = boolean(body, "stream")
    value = body.get("stream_options")
    if value is None:
        return stream, False
    options = record(value, "stream_options")
    refuse_unknown(options, ("include_usage", "include_obfuscation"), where="stream_options.")
    if not stream:
        message = "stream_options needs stream to be true: send both or neither."
        raise Refusal(message, param="stream_options", code="invalid_value")
    boolean(options, "include_obfuscation", param="stream_options.include_obfuscation")
    return stream, boolean(options, "include_usage", param="stream_options.include_usage")


def _prompts(value: object) -> list[object]:
    """The prompts of a completion body, each a string or a list of token ids, not checked further."""
    if value is None:
        raise Refusal("prompt is missing: send a string or token ids.", param="prompt", code="missing_field")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, an array of strings, or token ids", value)
    prompts: list[object] = value
    if not prompts:
        raise Refusal("prompt is an empty array: send at least one token.", param="prompt", code="invalid_value")
    first = prompts[0]
    if isinstance(first, int):
        return [prompts]
    if not isinstance(first, str | list):
        message = f"prompt is an array that holds {kind_of(first)}: send strings or token ids."
        raise Refusal(message, param="prompt", code="invalid_type")
    if odd := next((other for other in prompts if type(other) is not type(first)), None):
        message = f"prompt mixes {kind_of(first)} with {kind_of(odd)}: send prompts of one kind."
        raise Refusal(message, param="prompt", code="invalid_type")
    return prompts


def _prompt_ids(prompt: object, served: Served, encoder: PromptEncoder) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = tuple(encoder.encode(string(prompt, "prompt")))
    else:
        ids = tuple(_token_id(value, served) for value in array(prompt, "prompt"))
    if not ids:
        raise Refusal("prompt is empty: send at least one token.", param="prompt", code="invalid_value")
    return ids


def _token_id(value: object, served: Served) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"prompt holds {kind_of(value)} among its token ids: send integers only."
        raise Refusal(message, param="prompt", code="invalid_type")
    if not 0 <= value < served.vocab_size:
        message = f"prompt holds a token id that is not from 0 to {served.vocab_size - 1}."
        raise Refusal(message, param="prompt", code="invalid_value")
    return value
