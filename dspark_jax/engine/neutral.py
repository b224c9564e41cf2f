"""Fields of the OpenAI API that are accepted although nothing here reads them.

They cannot change the answer, or they have been left at the value that does not.
"""

from collections.abc import Mapping

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.fields import Json, wrong_type

# Book-keeping of the caller: any value of these types is fine.
_HARMLESS: Mapping[str, tuple[type, ...]] = {
    "user": (str,),
    "safety_identifier": (str,),
    "metadata": (dict,),
    "store": (bool,),
    "service_tier": (str,),
    "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,),
    "parallel_tool_calls": (bool,),
    "prediction": (dict,),
}

# Features this server does not have, each with the values that ask for nothing.
_SHARED: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
}
_CHAT: Mapping[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_COMPLETION: Mapping[str, tuple[object, ...]] = {
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {**_SHARED, **_CHAT}
COMPLETION_NEUTRAL: Mapping[str, tuple[object, ...]] = {**_SHARED, **_COMPLETION}


def neutral_names(neutral: Mapping[str, tuple[object, ...]]) -> frozenset[str]:
    """Names that `check_neutral` looks after."""
    return frozenset(_HARMLESS) | frozenset(neutral)


def check_neutral(body: Json, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuses a feature that is asked for and not there; null always means "not asked for"."""
    for name, types in _HARMLESS.items():
        value = body.get(name)
        if value is not None and not isinstance(value, types):
            kinds = {str: "a string", dict: "an object", bool: "true or false"}
            raise wrong_type(name, kinds[types[0]], value)
    for name, allowed in neutral.items():
        value = body.get(name)
        if value is None or any(_same(value, other) for other in allowed):
            continue
        remedy = f"leave it out or send {_listed(allowed)}" if allowed else "leave it out"
        message = f"This server does not support {name} and would have to ignore it: {remedy}."
        raise Refusal(message, param=name, code="unsupported_field")


def _same(value: object, other: object) -> bool:
    """Equal as JSON: 0 is 0.0 but not false."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _listed(allowed: tuple[object, ...]) -> str:
    words = {False: "false", True: "true"}
    return " or ".join(words[x] if isinstance(x, bool) else repr(x).replace("'", '"') for x in allowed)
