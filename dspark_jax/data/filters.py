"""Which synthesized prompts are worth answering: cheap rules on the text, each with a reason that is counted."""

import re
from collections import Counter
from dataclasses import dataclass

from dspark_jax.data.repetition import repeated_fraction
from dspark_jax.data.words import normalised_words

# Control tokens of the chat templates in use (ChatML, Llama 2 and 3, Gemma, Mistral), as they look when leaked as text.
CONTROL = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<\|?turn\|?>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>|</?s>|\[/?INST\]"
)

_ENDINGS = tuple(".?!:;)]}\"'`”’…。？！")


@dataclass(frozen=True, kw_only=True)
class PromptFilters:
    """Limits for one prompt; a text that breaks one is dropped with that reason."""

    min_words: int = 4
    max_words: int = 300
    max_repeated_ngrams: float = 0.15
    """The share of 4-word runs that occurred before in the same prompt."""
    max_repeated_lines: int = 2
    """How often one line of four words or more may occur."""
    min_text_fraction: float = 0.8
    """The share of letters, digits and spaces; listings of symbols fall below."""
    min_letter_fraction: float = 0.35
    ends_properly: bool = True
    """The model ended the turn itself, and the text ends with punctuation or a closing quote, bracket or fence."""


def rejection(text: str, filters: PromptFilters, *, ended: bool = True) -> str | None:
    """Why the prompt is dropped, or None. `ended` is False when generation was cut by the token limit."""
    if CONTROL.search(text):
        return "holds a control token of a chat template"
    if "\ufffd" in text:
        return "holds bytes that are not text"
    if filters.ends_properly and not (ended and text.rstrip().endswith(_ENDINGS)):
        return "does not end properly"
    words = normalised_words(text)
    if not filters.min_words <= len(words) <= filters.max_words:
        return "is too short" if len(words) < filters.min_words else "is too long"
    letters = sum(map(str.isalpha, text))
    others = sum(character.isdigit() or character.isspace() for character in text)
    if letters < filters.min_letter_fraction * len(text) or letters + others < filters.min_text_fraction * len(text):
        return "is mostly not text"
    if repeated_fraction(words, 4) > filters.max_repeated_ngrams:
        return "repeats itself"
    lines = Counter(line for line in map(str.strip, text.splitlines()) if len(line.split()) >= 4)
    if lines and max(lines.values()) > filters.max_repeated_lines:
        return "repeats a line"
    return None
