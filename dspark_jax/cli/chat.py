"""Chat in the terminal; drafted tokens are coloured, and their gain in speed is shown on request."""

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console

from dspark_jax.core.signals import INTERRUPTED, exit_status
from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model, remember_compilations
from dspark_jax.engine.blocking import stream_choice
from dspark_jax.engine.choice import ChoiceStats, Piece
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.leaving import leave
from dspark_jax.engine.request import SEED_BITS, ChoiceRequest, choice_seed

HELP = """\
/compare          answer the last message again with and without drafting, and show both speeds
/temperature [T]  show or set the temperature, from 0 (greedy) to 2
/reset            forget the conversation
/help             this list
/exit             leave (so does Ctrl-D); Ctrl-C stops an answer"""

_PROMPT = "> "
_DRAFTED = "green"
# An answer gets at least this much of the context; the oldest turns make room for it.
_LEAST_ROOM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message (by default the chat template's own)")
    parser.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help="0 is greedy (%(default)s)")
    parser.add_argument("--max-tokens", type=at_least(1), default=512, metavar="N", help="of one answer (%(default)s)")
    parser.add_argument("--seed", type=at_least(0), metavar="N", help="makes the answers repeatable")
    parser.add_argument("--compare", action="store_true", help="run /compare after every answer")
    parser.set_defaults(max_batch=1)


def run(args: argparse.Namespace) -> int:
    """Chats until the input ends."""
    remember_compilations(_note)
    with _Chat(load_model(args, _note), args, Console(highlight=False, markup=False, emoji=False)) as chat:
        chat.loop()
    return 0


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """An answer, the time it took (its prompt included), and its counts."""

    text: str
    seconds: float
    stats: ChoiceStats

    @property
    def speed(self) -> float:
        return self.stats.tokens / self.seconds

    @property
    def accepted_length(self) -> float:
        """Tokens committed a round, the bonus included."""
        return self.stats.committed / self.stats.rounds


class _Chat:
    def __init__(self, model: LoadedModel, args: argparse.Namespace, console: Console) -> None:
        self._model = model
        self._console = console
        self._temperature: float = args.temperature
        self._max_tokens: int = args.max_tokens
        self._always_compare: bool = args.compare
        self._repeatable = args.seed is not None
        self._seed: int = secrets.randbits(SEED_BITS) if args.seed is None else args.seed
        self._system = [{"role": "system", "content": args.system}] if args.system else []
        self._turns: list[dict[str, str]] = []
        self._last: ChoiceRequest | None = None
        self._answers = 0
        self._engines: dict[bool, Engine] = {}

    def __enter__(self) -> "_Chat":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for engine in self._engines.values():
            if error is None:
                leave(engine, 0)
            else:
                leave(engine, exit_status(error), f"{INTERRUPTED}\n")

    def loop(self) -> None:
        """Reads messages and commands until the input ends or /exit."""
        self._engine(drafting=True)
        self._greet()
        while (line := self._read()) is not None:
            if not line:
                continue
            command, _, rest = line.partition(" ")
            if command == "/exit":
                return
            try:
                if command.startswith("/"):
                    self._command(command, rest.strip())
                else:
                    self._talk(line)
            except Refusal as refusal:
                self._say(refusal.message)
            except KeyboardInterrupt:
                self._say("(stopped)", style="dim")

    def _greet(self) -> None:
        if not self._console.is_terminal:
            return
        self._say(f"Chatting with {self._model.name}; /help lists the commands.")
        if self._model.drafts:
            self._console.print("Accepted drafts look like this", style=_DRAFTED, end="")
            self._say(", tokens of the target itself like this.")

    def _read(self) -> str | None:
        """The next line; None at the end. Ctrl-C at the prompt only drops the line."""
        if not sys.stdin.isatty():
            # No terminal shows what is typed, and a transcript without its questions is hard to read.
            if line := sys.stdin.readline():
                self._console.out(f"{_PROMPT}{line.strip()}", highlight=False)
            return line.strip() if line else None
        while True:
            try:
                return input(_PROMPT).strip()
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                self._say("\n(/exit or Ctrl-D leaves)")

    def _command(self, command: str, rest: str) -> None:
        if command == "/help":
            self._console.out(HELP)
        elif command == "/reset":
            self._turns, self._last = [], None
            self._say("The conversation is forgotten.")
        elif command == "/temperature":
            self._set_temperature(rest)
        elif command == "/compare":
            self._compare()
        else:
            self._say(f"There is no command {command}; /help lists them.")

    def _set_temperature(self, text: str) -> None:
        if text:
            try:
                self._temperature = _temperature(text)
            except argparse.ArgumentTypeError as error:
                self._say(f"The temperature stays {self._temperature:g}: {error}.")
                return
        self._say(f"The temperature is {self._temperature:g}.")

    def _talk(self, message: str) -> None:
        self._turns.append({"role": "user", "content": message})
        try:
            prompt = self._prompt()
        except ValueError as error:
            self._turns.pop()
            self._say(f"{error}.")
            return
        sampling = Sampling(
            temperature=self._temperature,
            seed=choice_seed(self._seed, self._answers),
            pinned=self._repeatable and self._temperature > 0,
        )
        room = self._model.max_len - len(prompt)
        self._last = ChoiceRequest(index=0, prompt=prompt, sampling=sampling, max_tokens=min(self._max_tokens, room))
        self._answers += 1
        said: list[str] = []

        def show(piece: Piece) -> None:
            said.append(piece.text)
            self._show(piece)

        try:
            answer = self._answer(self._engine(drafting=True), self._last, show)
        finally:
            # What was said before Ctrl-C is part of the conversation too.
            self._turns.append({"role": "assistant", "content": "".join(said)})
            self._console.print()
        drafts = f"accepted length {answer.accepted_length:.2f}, " if self._model.drafts else ""
        self._say(f"({answer.stats.tokens} tokens, {drafts}{answer.speed:.1f} tokens/s)", style="dim")
        if self._always_compare:
            self._compare()

    def _prompt(self) -> tuple[int, ...]:
        """Ids of the conversation; forgets its oldest turns while it leaves too little room for an answer."""
        while True:
            prompt = tuple(self._model.tokenizer.encode_chat([*self._system, *self._turns]))
            room = self._model.max_len - len(prompt)
            if room >= min(_LEAST_ROOM, self._max_tokens):
                return prompt
            if len(self._turns) < 3:
                raise ValueError(f"The message is too long: the context holds {self._model.max_len} tokens")
            del self._turns[:2]
            self._say("(The context is full: the oldest turn is forgotten.)", style="dim")

    def _compare(self) -> None:
        if self._last is None:
            self._say("There is nothing to compare yet: say something first.")
            return
        if not self._model.drafts:
            self._say("There is no drafter to compare with.")
            return
        drafting, plain_engine = self._engine(drafting=True), self._engine(drafting=False)
        with self._console.status("Answering again, with and without drafting ..."):
            # The first pass without drafts may have to compile; the one with drafts has already been here.
            self._answer(plain_engine, self._last, _hide)
            plain = self._answer(plain_engine, self._last, _hide)
            drafted = self._answer(drafting, self._last, _hide)
        if not plain.stats.tokens or not drafted.stats.tokens:
            self._say("The answer is empty: there is nothing to time.")
            return
        self._say(
            f"with drafting:    {drafted.speed:8.1f} tokens/s, accepted length {drafted.accepted_length:.2f}\n"
            f"without drafting: {plain.speed:8.1f} tokens/s\n"
            f"speed-up:         {drafted.speed / plain.speed:8.2f}x"
        )
        if self._last.sampling.temperature == 0:
            same = "the same text" if plain.text == drafted.text else "DIFFERENT texts"
            self._say(f"Both gave {same}.")

    def _answer(self, engine: Engine, choice: ChoiceRequest, show: Callable[[Piece], None]) -> _Answer:
        """One answer to its end; Ctrl-C frees its slot and goes on to the caller."""
        started = time.perf_counter()
        text: list[str] = []
        with closing(stream_choice(engine, choice)) as rounds:
            for progress in rounds:
                text.append(progress.text)
                for piece in progress.pieces:
                    show(piece)
                if progress.stats is not None:
                    seconds = time.perf_counter() - started
                    return _Answer(text="".join(text), seconds=seconds, stats=progress.stats)
        raise AssertionError("the last round of a choice carries its counts")

    def _say(self, text: str, style: str | None = None) -> None:
        """A line of the program's own; never broken at the width of the terminal, which a pipe has not."""
        self._console.print(text, style=style, soft_wrap=True)

    def _show(self, piece: Piece) -> None:
        # Control characters would be obeyed by the terminal.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece.text)
        self._console.out(text, style=_DRAFTED if piece.drafted else None, end="", highlight=False)
        self._console.file.flush()

    def _engine(self, *, drafting: bool) -> Engine:
        """The engine with or without drafts, started when it is first needed."""
        if drafting not in self._engines:
            _note(f"Compiling{'' if drafting else ' the target without drafts'}; the first time takes longest ...")
            # One place in the queue: an answer that was just stopped still holds the only slot for a round.
            self._engines[drafting] = self._model.engine(max_queue=1, drafting=drafting, say=_note)
            self._engines[drafting].start()
        engine = self._engines[drafting]
        if not engine.wait_started():
            raise OSError(f"the engine failed: {engine.error}") from engine.error
        return engine


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def _hide(piece: Piece) -> None:
    del piece


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
