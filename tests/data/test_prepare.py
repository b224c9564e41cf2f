from dspark_jax.data.chat import BadRow, Row, parse_conversation
from dspark_jax.data.dedup import Deduplicator
from dspark_jax.data.prepare import Duplicate, Prompt, prepare


def prepared(*values):
    rows = [
        value if isinstance(value, BadRow) else Row(value=value, text=f"text {i}", where=f"in:{i}")
        for i, value in enumerate(values)
    ]
    return list(prepare(rows, Deduplicator(0.8), source="blend"))


def test_the_users_turns_are_kept_and_the_answers_are_not():
    said = [("system", "Be brief"), ("human", "One?"), ("gpt", "OLD"), ("human", "Two?"), ("gpt", "OLD")]
    row = {"conversations": [{"from": role, "value": text} for role, text in said]}
    whole, bare = prepared(row | {"source": "maths"}, {"turns": ["Three?"]})
    assert whole == Prompt(row={"turns": ["One?", "Two?"], "system": "Be brief", "source": "maths"}, first="One?")
    assert bare == Prompt(row={"turns": ["Three?"], "source": "blend"}, first="Three?")


def test_a_conversation_with_tools_is_kept_whole():
    row = {"messages": [{"role": "user", "content": "One?"}], "tools": [{"name": "f"}], "finish": "length"}
    (prompt,) = prepared(row)
    assert parse_conversation(prompt.row) == parse_conversation(row | {"source": "blend"})


def test_exact_and_near_duplicates_and_bad_rows_are_told_apart():
    words = [f"word{i}" for i in range(40)]
    bad = BadRow(error="in:4: no", text="{")
    items = prepared(
        {"turns": [" ".join(words)]},
        {"turns": [" ".join(words).upper() + "!"]},
        {"turns": [" ".join([*words, "more"])]},
        {"turns": [" ".join(words[:20])]},
        {"turns": [" ".join(words[:20]), " ".join(words[:20:-1])]},
        bad,
        {"turns": []},
    )
    assert [type(item) for item in items] == [Prompt, Duplicate, Duplicate, Prompt, Prompt, BadRow, BadRow]
    assert items[1] == Duplicate(where="in:1")
    assert items[5] is bad
    assert items[6].error == "in:6: the first message after the system message is not the user's"
    assert items[6].text == "text 6"
