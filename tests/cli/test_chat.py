"""`dspark chat` over a scripted engine, and once over a real one."""

import argparse
import io
import re

import pytest

from dspark_jax.cli import chat
from dspark_jax.core.signals import Terminated
from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.decoding.slots import SlotRound
from dspark_jax.engine.assembly import LoadedModel
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.leaving import leave

EOS = 1


class Echo:
    """Slots that answer every prompt with the same words, three drafted tokens and one of the target's a round."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.says = "abcdefgh"
        self.live, self.prompts, self.samplings, self.failures = {}, [], [], []

    @property
    def free(self):
        return 1 - len(self.live)

    def warm_up(self):
        pass

    def admit_many(self, prompts, samplings):
        self.prompts += map(self.tokenizer.decode, prompts)
        self.samplings += samplings
        self.live = {len(self.prompts): 0}
        return list(self.live)

    def release(self, handle):
        self.live.pop(handle)

    def step(self):
        if self.failures:
            raise self.failures.pop()
        ((handle, at),) = self.live.items()
        tokens = tuple(self.tokenizer.encode(self.says)[at : at + 4]) or (EOS,)
        self.live[handle] = at + len(tokens)
        accepted = len(tokens) - 1
        return [
            SlotRound(
                handle=handle,
                tokens=tokens,
                proposed=3,
                verified=3,
                accepted=accepted,
                confidence=(1.0,) * 3,
                evidence=(),
            )
        ]


@pytest.fixture
def flags(chat_target, golden):
    def parse(*more):
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        draft = golden / "drafters" / "dspark_vanilla_llama"
        return parser.parse_args(["--target", str(chat_target), "--draft", str(draft), *more])

    return parse


@pytest.fixture
def scripted(monkeypatch, flags):
    """A loaded model whose engines say "abcdefgh"; the slots they use."""
    monkeypatch.setattr(chat, "remember_compilations", lambda say: None)
    slots = Echo(load_tokenizer(flags().target))

    def make_slots():
        slots.live = {}
        return slots

    def engine(self, *, max_queue, drafting, say):
        say("1 of 2 kinds of round are compiled ...")
        return Engine(
            make_slots,
            detokenizer=self.tokenizer.stream,
            stop_ids=self.stop_ids,
            max_batch=1,
            max_queue=max_queue,
        )

    monkeypatch.setattr(LoadedModel, "engine", engine)
    return slots


@pytest.fixture
def talk(monkeypatch, capsys, flags):
    """Runs the verb with these lines on a standard input that is no terminal; what it printed."""

    def run(*lines, args=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert chat.run(flags(*args)) == 0
        return capsys.readouterr().out

    return run


def test_answers_that_are_to_be_repeatable_do_not_depend_on_what_a_policy_makes_of_this_machine(scripted, talk):
    for args in ((), ("--seed", "3"), ("--seed", "3", "--temperature", "0")):
        talk("hello", args=args)
    assert [sampling.pinned for sampling in scripted.samplings] == [False, True, False]


def test_an_answer_comes_with_accepted_length_and_speed_and_without_colours(scripted, talk):
    out = talk("hello")
    question, first, second, *rest = out.splitlines()
    assert (question, first) == ("> hello", "abcdefgh")
    # Two rounds of four tokens and one that brings the end.
    assert re.fullmatch(r"\(8 tokens, accepted length 3\.00, [0-9.]+ tokens/s\)", second)
    assert rest == []
    assert "\x1b" not in out


def test_a_transcript_holds_the_questions_and_is_apart_from_the_news(scripted, monkeypatch, capsys, flags):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/temperature\n  two  "))
    chat.run(flags())
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if not line.startswith("(")]
    assert lines == ["> one", "abcdefgh", "> /temperature", "The temperature is 0.7.", "> two", "abcdefgh"]
    assert err.splitlines()[-2:] == [
        "Compiling; the first time takes longest ...",
        "1 of 2 kinds of round are compiled ...",
    ]


def test_the_conversation_goes_on_until_it_is_reset(scripted, talk):
    talk("one", "two", "/reset", "three", args=("--system", "be brief"))
    assert scripted.prompts == [
        "s:be brief\nu:one\na:",
        "s:be brief\nu:one\na:abcdefgh\nu:two\na:",
        "s:be brief\nu:three\na:",
    ]


def test_compare_runs_the_last_prompt_again_and_says_the_ratio(scripted, talk):
    out = talk("/compare", "hello", "/compare", args=("--temperature", "0"))
    assert out.startswith("> /compare\nThere is nothing to compare yet")
    assert re.search(r"with drafting: +[0-9.]+ tokens/s, accepted length 3\.00\n", out)
    assert re.search(r"without drafting: +[0-9.]+ tokens/s\n", out)
    assert re.search(r"speed-up: +[0-9.]+x\n", out)
    assert "Both gave the same text." in out
    assert len(set(scripted.prompts)) == 1
    assert len({sampling.seed for sampling in scripted.samplings}) == 1


def test_the_compare_flag_compares_after_every_answer(scripted, talk):
    assert talk("one", "two", args=("--compare",)).count("speed-up") == 2


def test_without_a_drafter_there_is_nothing_to_compare(scripted, talk):
    out = talk("hello", "/compare", args=("--draft", "none"))
    assert "There is no drafter to compare with." in out
    assert "accepted length" not in out


def test_commands(scripted, talk):
    out = talk("/temperature", "/temperature 1.5", "/temperature hot", "/nonsense", "/help", "", "hi", "/exit", "never")
    assert "The temperature is 0.7." in out
    assert "The temperature is 1.5." in out
    assert "stays 1.5: 'hot' is not a number from 0 to 2." in out
    assert "There is no command /nonsense" in out
    assert chat.HELP in out
    assert [sampling.temperature for sampling in scripted.samplings] == [1.5]


def test_a_seed_makes_answers_repeatable_and_each_its_own(scripted, talk):
    talk("one", "two", args=("--seed", "4"))
    talk("one", "two", args=("--seed", "4"))
    seeds = [sampling.seed for sampling in scripted.samplings]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_a_message_too_long_for_the_context_is_said_and_forgotten(scripted, talk):
    out = talk("x" * 500, "short", args=("--max-len", "200"))
    assert "too long: the context holds 200 tokens." in out
    assert scripted.prompts == ["u:short\na:"]


def test_the_oldest_turns_make_room(scripted, talk):
    out = talk("x" * 60, "y" * 60, "z", args=("--max-len", "160"))
    assert "the oldest turn is forgotten" in out
    assert scripted.prompts[-1] == "u:" + "y" * 60 + "\na:abcdefgh\nu:z\na:"


def test_an_engine_failure_is_said_and_the_chat_goes_on(scripted, talk, caplog):
    scripted.failures.append(RuntimeError("out of memory"))
    out = talk("one", "two")
    assert "The server failed" in out or "failed while it worked" in out
    assert "abcdefgh" in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch, flags):
    """Runs the verb on a terminal; each of `says` is a line or an exception that reading it raises."""

    def run(*says, args=()):
        says, screen = list(says), Terminal()

        def read(prompt):
            said = says.pop(0)
            if isinstance(said, type):
                raise said
            return said

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert chat.run(flags(*args)) == 0
        return screen.getvalue()

    return run


def test_accepted_drafts_are_coloured_and_the_targets_tokens_are_not(scripted, terminal):
    out = terminal("hello", EOFError)
    assert "\x1b[32mabc\x1b[0md\x1b[32mefg\x1b[0mh" in out


def test_ctrl_c_stops_an_answer_and_not_the_program(scripted, terminal, monkeypatch):
    shown = []

    def interrupt_once(self, piece):
        shown.append(piece.text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat._Chat, "_show", interrupt_once)
    out = terminal("one", "two", KeyboardInterrupt, EOFError)
    assert "(stopped)" in out
    assert "(/exit or Ctrl-D leaves)" in out
    assert shown == ["abc", "d", "abc", "d", "efg", "h"]
    assert scripted.prompts[1] == "u:one\na:abcd\nu:two\na:", "what was said stays said"


@pytest.mark.parametrize(("ended", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_chat_that_a_signal_ends_leaves_its_engine_with_the_status_of_the_signal(
    scripted, flags, monkeypatch, ended, code
):
    class Ending(io.StringIO):
        def readline(self):
            raise ended

    left = []
    monkeypatch.setattr("sys.stdin", Ending())
    monkeypatch.setattr(chat, "leave", lambda engine, *how: left.append((leave(engine, 0), *how)))
    with pytest.raises(ended):
        chat.run(flags())
    assert left == [(0, code, "Interrupted.\n")]


def test_control_characters_of_the_model_do_not_reach_the_terminal(scripted, terminal):
    scripted.says = "a\x1b[2Jb"
    out = terminal("hello", EOFError)
    assert "\x1b[2J" not in out


@pytest.mark.slow
def test_a_real_model_gives_the_same_text_with_and_without_drafts(talk, monkeypatch):
    monkeypatch.setattr(chat, "remember_compilations", lambda say: None)
    out = talk("hello there", "/compare", args=("--temperature", "0", "--max-tokens", "40", "--max-len", "120"))
    assert "Both gave the same text." in out
    (tau,) = re.findall(r"tokens, accepted length ([0-9.]+)", out)
    assert float(tau) > 1
