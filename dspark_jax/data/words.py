"""One normal form of text, shared by filters, deduplication, decontamination and the train/validation split."""

import re
import unicodedata

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
# Scripts written without spaces count one word a character; otherwise a word is a run of letters, digits and _.
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


def normalised_words(text: str) -> list[str]:
    """The words of a text without case, punctuation, spacing or compatibility forms."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalised(text: str) -> str:
    """The words joined by single spaces: equal for texts that differ only in case, punctuation or spacing."""
    return " ".join(normalised_words(text))
