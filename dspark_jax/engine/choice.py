"""From the tokens of one slot to the text, the finish reason and the counts of one choice."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from dspark_jax.decoding.slots import SlotRound
from dspark_jax.engine.request import ChoiceRequest
from dspark_jax.engine.stops import StopFilter

Finish = Literal["stop", "length"]


@runtime_checkable
class Detokenizer(Protocol):
    """Text of a growing token sequence; holds back what is not yet a whole character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text with one origin: an accepted draft or a token the target chose."""

    text: str
    drafted: bool


@dataclass(frozen=True, kw_only=True)
class ChoiceStats:
    """Counts of one choice.

    `tokens` are those the client received: every token that begins before the end of the delivered text. The
    end-of-turn token, a stop string's own tokens and what a round brought beyond the end are not among them.
    `accepted` are the delivered tokens that were drafts, `rejected` all other drafts that were verified.
    `committed` counts what the rounds committed, so committed / rounds is the accepted length.
    """

    tokens: int
    accepted: int
    rejected: int
    rounds: int
    committed: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one round added to a choice; the last one of a choice carries `finish` and `stats`."""

    index: int
    pieces: tuple[Piece, ...] = ()
    finish: Finish | None = None
    stats: ChoiceStats | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class ChoiceWriter:
    """Follows one choice from its first round to its end; used by the engine thread alone."""

    def __init__(self, choice: ChoiceRequest, *, detokenizer: Detokenizer, stop_ids: Set[int]) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._filter = StopFilter(choice.stop)
        # For every token of the answer: where its text begins, and whether it was a draft.
        self._begins: list[int] = []
        self._drafted: list[bool] = []
        # Text that went into the filter and has not come out, as [length, drafted], oldest first.
        self._unsent: deque[list[int]] = deque()
        self._length = 0
        self._sent = 0
        self._rounds = 0
        self._verified = 0
        self._committed = 0

    def feed(self, slot_round: SlotRound) -> Progress:
        """Takes a round's tokens up to the one that ends the choice."""
        self._rounds += 1
        self._verified += slot_round.verified
        self._committed += len(slot_round.tokens)
        pieces: list[Piece] = []
        finish: Finish | None = None
        for position, token in enumerate(slot_round.tokens):
            if token in self._stop_ids:
                finish = "stop"
                break
            drafted = position < slot_round.accepted
            self._begins.append(self._length)
            self._drafted.append(drafted)
            self._write(self._detokenizer.push((token,)), drafted, pieces)
            if self._filter.stopped:
                break
            if len(self._begins) == self._choice.max_tokens:
                finish = "length"
                break
        if finish is not None:
            self._write(self._detokenizer.flush(), bool(self._drafted and self._drafted[-1]), pieces)
            self._send(self._filter.flush(), pieces)
        if self._filter.stopped:
            finish = "stop"
        stats = None if finish is None else self._stats()
        return Progress(index=self._choice.index, pieces=tuple(pieces), finish=finish, stats=stats)

    def _write(self, text: str, drafted: bool, pieces: list[Piece]) -> None:
        if text:
            self._length += len(text)
            self._unsent.append([len(text), drafted])
            self._send(self._filter.push(text), pieces)

    def _send(self, text: str, pieces: list[Piece]) -> None:
        """Appends `text`, cut where its origin changes."""
        self._sent += len(text)
        while text:
            held = self._unsent[0]
            part, text = text[: held[0]], text[held[0] :]
            held[0] -= len(part)
            drafted = bool(held[1])
            if not held[0]:
                self._unsent.popleft()
            if pieces and pieces[-1].drafted == drafted:
                part = pieces.pop().text + part
            pieces.append(Piece(text=part, drafted=drafted))

    def _stats(self) -> ChoiceStats:
        delivered = self._drafted
        if self._filter.stopped:
            delivered = delivered[: bisect_left(self._begins, self._sent)]
        accepted = sum(delivered)
        return ChoiceStats(
            tokens=len(delivered),
            accepted=accepted,
            rejected=self._verified - accepted,
            rounds=self._rounds,
            committed=self._committed,
        )
