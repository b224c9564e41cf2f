"""Answers from the target itself: the recommended training data, since a drafter is judged by what its target says.

Every user turn is answered in its turn, with the answers before it in view. Rows are written as they finish; what is
already in the output is not asked again, so a killed run goes on where it was.

Conversations with tools are kept as they are: an answer of today would not fit a tool's recorded result, and nothing
here runs tools. One that has no answer to keep is rejected.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from dspark_jax.data.chat import BadRow, Conversation
from dspark_jax.data.generation import Answer, Failure, GenerateOrFail, Request, Tokenizer
from dspark_jax.data.journal import Journal
from dspark_jax.data.repetition import LoopRule, loop_start

# An answer with less room than this (in tokens) is not worth asking for.
_LEAST_ROOM = 16


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How answers are sampled. Each row gets one of the temperatures, by its key.

    loops: what is cut from answers at the temperatures up to `loops_up_to` (greedy text falls into loops).
    max_len: tokens of prompt and answer together that the model takes.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    loops: LoopRule | None = field(default_factory=LoopRule)
    loops_up_to: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures are one or more numbers from 0 up, not {self.temperatures}")
        if self.max_new_tokens < 1 or not 0 < self.top_p <= 1:
            raise ValueError("answers need max_new_tokens >= 1 and 0 < top_p <= 1")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row done: written as answered or as it was, or rejected for a reason; `tokens` are those of new answers."""

    key: str
    tokens: int = 0
    as_it_was: bool = False
    rejected: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Dialogue:
    """A row on its way: the messages so far, the user turns still to be asked."""

    key: str
    temperature: float
    origin: Conversation
    messages: tuple[dict[str, str], ...]
    waiting: tuple[str, ...]
    tokens: int = 0


class Regeneration:
    """One pass over the input; `outcomes()` runs it. `already` counts rows found done, once it has run."""

    def __init__(
        self,
        conversations: Iterable[Conversation | BadRow],
        *,
        generate: GenerateOrFail,
        tokenizer: Tokenizer,
        answered: Journal,
        rejected: Journal,
        answering: Answering,
        max_len: int,
    ):
        self._rows = iter(conversations)
        self._generate, self._tokenizer = generate, tokenizer
        self._answered, self._rejected = answered, rejected
        self._answering, self._max_len = answering, max_len
        self._follow_ups: deque[_Dialogue] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._seen: Counter[str] = Counter()
        self.already = 0

    def outcomes(self) -> Iterator[Outcome]:
        """Yields each row after it was written, in the order the rows finish."""
        while (first := next(self._requests(), None)) is not None:
            # Follow-ups may appear after the requests ran out for this round, hence the outer loop.
            for answer in self._generate(_chain(first, self._requests())):
                self._take(answer)
                yield from self._drain()
        yield from self._drain()

    def _requests(self) -> Iterator[Request]:
        while True:
            dialogue = self._follow_ups.popleft() if self._follow_ups else self._next_row()
            if dialogue is None:
                return
            request = self._ask(dialogue)
            if request is not None:
                yield request

    def _next_row(self) -> _Dialogue | None:
        for row in self._rows:
            identity = row.text if isinstance(row, BadRow) else "\0".join([row.system or "", *row.prompts])
            key = self._key(identity)
            if key in self._answered.keys or key in self._rejected.keys:
                self.already += 1
            elif isinstance(row, BadRow):
                self._rejected.append(key, {"error": row.error, "text": row.text})
                self._outcomes.append(Outcome(key=key, rejected=row.error))
            elif row.uses_tools:
                self._keep(key, row)
            else:
                system = () if row.system is None else ({"role": "system", "content": row.system},)
                temperatures = self._answering.temperatures
                temperature = temperatures[_number(key, "temperature", self._answering.seed) % len(temperatures)]
                return _Dialogue(key=key, temperature=temperature, origin=row, messages=system, waiting=row.prompts)
        return None

    def _keep(self, key: str, row: Conversation) -> None:
        if not any(message.role == "assistant" for message in row.messages):
            self._file_rejected(key, row, "it offers tools and has no recorded answer to keep")
            return
        kept = {"messages": row.as_rows(), "tools": list(row.tools), "finish": row.finish, "source": row.source}
        self._answered.append(key, kept)
        self._outcomes.append(Outcome(key=key, as_it_was=True))

    def _ask(self, dialogue: _Dialogue) -> Request | None:
        """The request for the next user turn; None when it does not fit (the row is then rejected)."""
        turn, *waiting = dialogue.waiting
        messages = (*dialogue.messages, {"role": "user", "content": turn})
        prompt = self._tokenizer.encode_chat(list(messages), add_generation_prompt=True)
        room = self._max_len - len(prompt)
        if room < min(_LEAST_ROOM, self._answering.max_new_tokens):
            reason = f"the prompt has {len(prompt)} tokens and the model takes {self._max_len} with the answer"
            self._reject(dialogue, reason)
            return None
        return Request(
            prompt=tuple(prompt),
            temperature=dialogue.temperature,
            top_p=self._answering.top_p,
            seed=_number(dialogue.key, len(messages), self._answering.seed),
            max_new_tokens=min(self._answering.max_new_tokens, room),
            tag=replace(dialogue, messages=messages, waiting=tuple(waiting)),
            messages=messages,
        )

    def _take(self, answer: Answer | Failure) -> None:
        """Files an answer: the row is written, rejected, or goes on with its next turn."""
        dialogue: _Dialogue = answer.request.tag
        if isinstance(answer, Failure):
            self._reject(dialogue, answer.reason)
            return
        tokens, finish, rule = answer.tokens, answer.finish, self._answering.loops
        start = None
        if rule is not None and dialogue.temperature <= self._answering.loops_up_to:
            start = loop_start(tokens, rule)
            if start is not None:
                tokens, finish = tokens[: start + rule.window], "length"
        # A cut can split a character; space before the first word would not tokenise as it was generated.
        given = answer.text if start is None else None
        text = (
            (self._tokenizer.decode(tokens) if given is None else given)
            .rstrip("\ufffd" if finish == "length" else "")
            .lstrip()
        )
        if not text.strip():
            self._reject(dialogue, "the answer is empty")
            return
        if rule is not None and start is not None and start < rule.min_tokens:
            self._reject(dialogue, "the answer is nothing but a loop")
            return
        messages = (*dialogue.messages, {"role": "assistant", "content": text})
        total = dialogue.tokens + len(tokens)
        # An answer that was cut is the last one: nobody asks on after half a sentence.
        if dialogue.waiting and finish == "stop":
            self._follow_ups.append(replace(dialogue, messages=messages, tokens=total))
            return
        row = {"messages": messages, "temperature": dialogue.temperature, "finish": finish, "tokens": total}
        row |= {"looped": True} if start is not None else {}
        self._answered.append(dialogue.key, row | {"source": dialogue.origin.source})
        self._outcomes.append(Outcome(key=dialogue.key, tokens=total))

    def _reject(self, dialogue: _Dialogue, reason: str) -> None:
        self._file_rejected(dialogue.key, dialogue.origin, reason)

    def _file_rejected(self, key: str, row: Conversation, reason: str) -> None:
        reason = f"{row.where}: {reason}" if row.where else reason
        system = {} if row.system is None else {"system": row.system}
        self._rejected.append(key, {"error": reason, "turns": list(row.prompts), **system, "source": row.source})
        self._outcomes.append(Outcome(key=key, rejected=reason))

    def _drain(self) -> Iterator[Outcome]:
        while self._outcomes:
            yield self._outcomes.popleft()

    def _key(self, identity: str) -> str:
        """A digest of the row; equal rows are told apart by how often the row came before."""
        digest = hashlib.blake2b(identity.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
        self._seen[digest] += 1
        return digest if self._seen[digest] == 1 else f"{digest}-{self._seen[digest]}"


def _chain(first: Request, rest: Iterator[Request]) -> Iterator[Request]:
    yield first
    yield from rest


def _number(*parts: object) -> int:
    """31 bits that depend on the parts alone."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
