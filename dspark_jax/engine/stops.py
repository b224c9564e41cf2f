"""Stop strings over text that arrives in pieces."""

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string.

    The match that *completes* first wins (of several that complete together, the longest), so what comes out
    does not depend on how the text was cut into pieces. Text that could still turn into a stop string is held
    back; the output never contains one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now safe to send; sets `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        pending = self._held + text
        ends = [(at + len(word), at) for word in self._stop if (at := pending.find(word)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return pending[: min(ends)[1]]
        keep = max((_overlap(pending, word) for word in self._stop), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `word`."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
