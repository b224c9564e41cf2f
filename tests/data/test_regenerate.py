import json
from itertools import islice

import pytest

from dspark_jax.data.chat import BadRow, parse_conversation
from dspark_jax.data.journal import Journal
from dspark_jax.data.regenerate import Answering, Regeneration
from dspark_jax.data.repetition import LoopRule


def asked(count):
    return [parse_conversation({"turns": [f"Question {i}?"], "source": "s"}, f"in.jsonl:{i}") for i in range(count)]


def last_words(tokenizer):
    """Answers with what the user said last, so that every answer shows its conversation."""

    def reply(request):
        said = tokenizer.decode(request.prompt).removesuffix("\nassistant\n")
        return f"You said: {said.rpartition('user')[2].strip()}"

    return reply


@pytest.fixture
def regenerate(tmp_path, tokenizer, model):
    def run(conversations, reply=None, stop_after=None, max_len=10_000, **settings):
        generate = model(reply or last_words(tokenizer))
        with Journal(tmp_path / "out.jsonl") as answered, Journal(tmp_path / "rejected.jsonl") as rejected:
            regeneration = Regeneration(
                conversations,
                generate=generate,
                tokenizer=tokenizer,
                answered=answered,
                rejected=rejected,
                answering=Answering(**settings),
                max_len=max_len,
            )
            outcomes = list(islice(regeneration.outcomes(), stop_after))
            run.rows, run.rejected, run.already = answered.rows(), rejected.rows(), regeneration.already
        run.asked = generate.asked
        return outcomes

    return run


def test_every_row_is_answered_and_written_with_its_law(regenerate):
    outcomes = regenerate(asked(7), temperatures=(0.0, 1.0), max_new_tokens=50, seed=3)
    assert len(outcomes) == len(regenerate.rows) == 7
    assert {row["key"] for row in regenerate.rows} == {outcome.key for outcome in outcomes}
    for row in regenerate.rows:
        question, answer = row["messages"]
        assert answer == {"role": "assistant", "content": f"You said: {question['content']}"}
        assert (row["finish"], row["source"], row["tokens"]) == ("stop", "s", len(answer["content"]))
    assert {row["temperature"] for row in regenerate.rows} == {0.0, 1.0}
    assert sum(outcome.tokens for outcome in outcomes) == sum(row["tokens"] for row in regenerate.rows)
    assert len({request.seed for request in regenerate.asked}) == 7
    assert {request.max_new_tokens for request in regenerate.asked} == {50}


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(regenerate, tmp_path):
    regenerate(asked(10))
    whole = {row["key"]: row for row in regenerate.rows}
    (tmp_path / "out.jsonl").unlink()
    regenerate(asked(10), stop_after=4)
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text[:-20])
    done = text.count("\n") - 1
    regenerate(asked(10))
    assert regenerate.already == done
    assert len(regenerate.asked) == 10 - done
    assert {row["key"]: row for row in regenerate.rows} == whole
    assert regenerate(asked(10)) == []
    assert regenerate.asked == []


def test_turns_are_answered_in_order_with_the_answers_before_in_view(regenerate, tokenizer):
    conversation = parse_conversation({"turns": ["One?", "Two?", "Three?"], "system": "Be brief"})
    (outcome,) = regenerate([conversation])
    (row,) = regenerate.rows
    assert [message["content"] for message in row["messages"]] == [
        "Be brief", "One?", "You said: One?", "Two?", "You said: Two?", "Three?", "You said: Three?",
    ]  # fmt: skip
    prompts = [tokenizer.decode(request.prompt) for request in regenerate.asked]
    assert prompts[2].startswith("system\nBe brief\nuser\nOne?\nassistant\nYou said: One?\nuser\nTwo?")
    assert outcome.tokens == row["tokens"] == len("You said: One?You said: Two?You said: Three?")
    assert len({request.temperature for request in regenerate.asked}) == 1
    assert len({request.seed for request in regenerate.asked}) == 3


def test_old_answers_are_replaced_and_not_shown(regenerate, tokenizer):
    row = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "OLD"}]}
    regenerate([parse_conversation(row)])
    assert regenerate.rows[0]["messages"][1]["content"] == "You said: One?"
    assert "OLD" not in tokenizer.decode(regenerate.asked[0].prompt)


def test_conversations_with_tools_are_kept_as_they_are_or_rejected(regenerate):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "OLD"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": messages, "tools": tools, "source": "s"}, {"turns": ["Two?"], "tools": tools}]
    kept, rejected = regenerate([parse_conversation(row) for row in rows])
    assert (kept.as_it_was, kept.tokens, kept.rejected) == (True, 0, None)
    assert [(row["messages"], row["tools"], row["source"]) for row in regenerate.rows] == [(messages, tools, "s")]
    assert rejected.rejected == "it offers tools and has no recorded answer to keep"
    assert regenerate.asked == []
    assert regenerate([parse_conversation(row) for row in rows]) == []


def test_an_answer_that_was_cut_ends_its_conversation(regenerate):
    regenerate([parse_conversation({"turns": ["One?", "Two?"]})], max_new_tokens=8)
    (row,) = regenerate.rows
    assert row["finish"] == "length"
    assert [message["content"] for message in row["messages"]] == ["One?", "You said"]


def test_bad_rows_are_kept_aside_with_their_reason_once(regenerate):
    bad = BadRow(error="in.jsonl:9: the line is not JSON", text='{"turns"', where="in.jsonl:9")
    outcomes = regenerate([*asked(2), bad])
    assert [outcome.rejected for outcome in outcomes if outcome.rejected] == [bad.error]
    assert len(regenerate.rows) == 2
    assert regenerate.rejected[0]["text"] == bad.text
    assert regenerate.rejected[0]["error"] == bad.error
    assert regenerate([*asked(2), bad]) == []
    assert regenerate.already == 3


def test_a_prompt_without_room_for_an_answer_is_rejected_and_one_with_some_gets_less(regenerate):
    long, short = ({"turns": ["x" * size]} for size in (90, 40))
    outcomes = regenerate([parse_conversation(long, "in.jsonl:1"), parse_conversation(short)], max_len=100)
    assert [outcome.rejected is None for outcome in outcomes].count(False) == 1
    assert regenerate.rejected[0]["error"].startswith("in.jsonl:1: the prompt has 1")
    assert regenerate.rejected[0]["turns"] == ["x" * 90]
    (request,) = regenerate.asked
    assert len(request.prompt) + request.max_new_tokens == 100


def test_equal_rows_are_all_answered(regenerate):
    regenerate([*asked(1), *asked(1), *asked(1)])
    assert len({row["key"] for row in regenerate.rows}) == 3


def test_loops_are_cut_where_greedy_text_falls_into_them(regenerate, tokenizer):
    start = "".join(chr(200 + i) for i in range(100))
    rule = LoopRule(ngram=4, window=20, repeated=0.8)

    def looping(request):
        return start + "ab" * 200

    regenerate(asked(4), looping, temperatures=(0.0,), loops=rule, max_new_tokens=600)
    for row in regenerate.rows:
        assert row["finish"] == "length"
        assert row["looped"]
        assert 100 < len(row["messages"][1]["content"]) == row["tokens"] < 125


def test_loops_stay_at_other_temperatures_and_without_a_rule(regenerate, tmp_path):
    def looping(request):
        return "intro " + "ab" * 200

    regenerate(asked(2), looping, temperatures=(0.7,))
    assert {row["tokens"] for row in regenerate.rows} == {406}
    (tmp_path / "out.jsonl").unlink()
    regenerate(asked(2), looping, temperatures=(0.0,), loops=None)
    assert {row["tokens"] for row in regenerate.rows} == {406}
    assert not any("looped" in row for row in regenerate.rows)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("", "the answer is empty"), ("\n ", "the answer is empty"), ("ab" * 99, "nothing but a loop")],
)
def test_answers_that_are_worth_nothing_are_rejected(regenerate, answer, reason):
    (outcome,) = regenerate(asked(1), lambda _: answer, temperatures=(0.0,))
    assert reason in outcome.rejected
    assert regenerate.rows == []
    assert regenerate.rejected[0]["error"] == f"in.jsonl:0: {outcome.rejected.removeprefix('in.jsonl:0: ')}"


def test_a_row_keeps_its_temperature_and_seed_whatever_stands_around_it(regenerate, tmp_path):
    regenerate(asked(20))
    together = {json.dumps(row["messages"]): row["temperature"] for row in regenerate.rows}
    (tmp_path / "out.jsonl").unlink()
    regenerate(asked(20)[::-2])
    assert all(together[json.dumps(row["messages"])] == row["temperature"] for row in regenerate.rows)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="temperatures"):
        Answering(temperatures=())
    with pytest.raises(ValueError, match="max_new_tokens"):
        Answering(max_new_tokens=0)
