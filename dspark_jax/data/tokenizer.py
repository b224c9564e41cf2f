"""A chat model's tokenizer: templates, ids, and text that appears while ids are still arriving."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
# A UTF-8 character has up to four bytes, and tokenizers may spend a token on each.
_MAX_BYTES = 4
_WINDOW = 32


class ChatTokenizer:
    """Text and messages <-> token ids. Special tokens written out in a text become their ids, as in a template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's vocabulary may be padded beyond it."""
        return len(self._tokenizer)

    @property
    def chat_template(self) -> str:
        """The chat template's text, or JSON of its texts by name; "null" when there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else json.dumps(template, sort_keys=True)

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of the rendered chat template, ready for the assistant's words unless told otherwise.

        Messages are {"role", "content"}, and `tool_calls` where tools are called. ValueError when there is no template,
        when it refuses them, or when it would pass over tools in silence.
        """
        return self._encode([messages], add_generation_prompt, tools)[0]

    def encode_chats(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool = True
    ) -> list[list[int]]:
        """`encode_chat` of many conversations at once, several times faster than one by one."""
        return self._encode(conversations, add_generation_prompt, ()) if conversations else []

    def _encode(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[list[int]]:
        if self._tokenizer.chat_template is None:
            raise ValueError("this tokenizer has no chat template: give an instruction-tuned target, or plain text")
        schemas: list[Any] | None = [dict(tool) for tool in tools] or None
        template = self._tokenizer.get_chat_template(tools=schemas)
        called = any("tool_calls" in message for messages in conversations for message in messages)
        if (schemas and "tools" not in template) or (called and "tool_calls" not in template):
            raise ValueError(
                "the chat template knows no tools, and would leave out what this conversation says of them"
            )
        try:
            ids: Any = self._tokenizer.apply_chat_template(
                [[dict(message) for message in messages] for messages in conversations],
                tools=schemas,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is put before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "Detokenizer":
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self)


class Detokenizer:
    """Text of ids as they come. The pieces and the flush together are `decode` of all ids.

    A piece never ends inside a UTF-8 character: what may still be completed waits for the next ids.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        # Only the last ids are decoded each time; the older of them keep the decoder's view of what came before.
        self._window: list[int] = []
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """What has become certain with these ids; often "" while a character is incomplete."""
        self._window += ids
        text = self._tokenizer.decode(self._window)
        # An unfinished character decodes to replacement marks at the end; more marks than bytes are bad input.
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_BYTES - 1)
        piece = self._send(text[: len(text) - unfinished])
        if not unfinished and len(self._window) > _WINDOW:
            self._window = self._window[-_MAX_BYTES:]
            self._sent = len(self._tokenizer.decode(self._window))
        return piece

    def flush(self) -> str:
        """What was waiting, as it is; call it once, after the last ids."""
        return self._send(self._tokenizer.decode(self._window))

    def _send(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece


def load_tokenizer(directory: str | Path) -> ChatTokenizer:
    """The tokenizer of a local Hugging Face directory, exactly as its tokenizer.json has it.

    FileNotFoundError when tokenizer.json is missing, ValueError when a file of it is damaged.
    """
    directory = Path(directory)
    file = directory / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"{directory} has no tokenizer.json; other tokenizer formats are not read")
    try:
        return ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True))
    except Exception as error:  # the Rust side of tokenizers raises plain Exception
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
