import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.chat import BadRow, Conversation, parse_conversation, read_conversations, read_rows


def roles(conversation):
    return [message.role for message in conversation.messages]


def test_the_three_formats_become_the_same_conversation():
    openai = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    assert parse_conversation(openai) == parse_conversation(sharegpt)
    assert parse_conversation({"turns": ["Hi", "More"]}).prompts == ("Hi", "More")
    assert roles(parse_conversation({"turns": ["Hi", "More"]})) == ["user", "user"]


def test_a_system_message_comes_from_the_messages_or_beside_them():
    within = {"messages": [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi"}]}
    assert parse_conversation(within).system == "Be brief"
    assert parse_conversation({"turns": ["Hi"], "system": "Be brief"}).system == "Be brief"
    assert parse_conversation({"turns": ["Hi"], "system": None}).system is None
    assert parse_conversation(within | {"system": "ignored"}).system == "Be brief"


def test_list_content_is_joined_and_finish_and_source_are_kept():
    content = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    row = {"messages": [{"role": "user", "content": content}], "finish": "length", "source": "seeded/maths"}
    conversation = parse_conversation(row, "f:3")
    assert conversation.prompts == ("Hi there",)
    assert (conversation.finish, conversation.source, conversation.where) == ("length", "seeded/maths", "f:3")


def message(role, content="x"):
    return {"role": role, "content": content}


def calling(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def test_calls_results_and_offered_tools_are_kept_in_the_form_templates_take():
    messages = [
        message("user"),
        calling({"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}, {"function": {"name": "g"}}),
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f", "other": None},
        {"role": "tool", "content": "4"},
        message("assistant"),
    ]
    row = {"messages": messages, "tools": json.dumps([{"name": "f", "parameters": {}}])}
    conversation = parse_conversation(row)
    assert conversation.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    assert conversation.as_rows()[1:4] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}},
                {"type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "4"},
    ]
    again = parse_conversation({"messages": conversation.as_rows(), "tools": list(conversation.tools)})
    assert again == conversation
    sharegpt = [
        {"from": "human", "value": "x"},
        {"from": "gpt", "value": "call"},
        {"from": "observation", "value": "y"},
    ]
    assert [m.role for m in parse_conversation({"conversations": sharegpt}).messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "row", [{"tools": [{"name": "f"}]}, {"messages": [message("user"), calling({"function": {"name": "f"}})]}]
)
def test_a_row_that_offers_or_calls_tools_uses_them(row):
    assert parse_conversation({"turns": ["x"]} | row).uses_tools
    assert not parse_conversation({"turns": ["x"]}).uses_tools


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([], "a row is a JSON object, not a list"),
        ({"text": "hi"}, "none of `messages`, `conversations` and `turns`"),
        ({"messages": "hi"}, "`messages` is a list, not text"),
        ({"messages": []}, "first message after the system message is not the user's"),
        ({"messages": [message("system")]}, "first message after the system message is not the user's"),
        ({"messages": [message("assistant")]}, "first message after the system message is not the user's"),
        ({"messages": ["hi"]}, r"`messages\[0\]` is an object with `role` and `content`, not text"),
        ({"messages": [message("critic")]}, r"`messages\[0\].role` is 'critic'"),
        ({"messages": [message("tool")]}, "first message after the system message is not the user's"),
        ({"messages": [message("user"), message("tool")]}, "nobody called the tool"),
        (
            {"messages": [message("user"), message("assistant"), message("tool"), message("user")]},
            "no assistant message answers",
        ),
        ({"messages": [message("user"), calling({"name": "f"})]}, r"`messages\[1\].tool_calls\[0\]` has no `function`"),
        (
            {"messages": [message("user"), calling({"function": {"name": "f", "arguments": "{"}})]},
            r"`messages\[1\].tool_calls\[0\].function.arguments` is text that is not JSON",
        ),
        (
            {"messages": [message("user"), calling({"function": {"name": "f", "arguments": [1]}})]},
            "arguments` is not an object",
        ),
        (
            {"messages": [message("user"), calling({"function": {"name": "\ud800"}})]},
            r"`messages\[1\]` holds a value that JSON in UTF-8 cannot",
        ),
        ({"turns": ["hi"], "tools": "[{"}, "`tools` is text that is not JSON"),
        ({"turns": ["hi"], "tools": 3}, "`tools` is not a list"),
        ({"turns": ["hi"], "tools": [{"type": "function"}]}, r"`tools\[0\]` is no function with a `name`"),
        ({"messages": [message(["user"])]}, r"`messages\[0\].role` is \['user'\]"),
        ({"messages": [message("user", "  ")]}, r"`messages\[0\].content` is empty"),
        ({"messages": [message("user", None)]}, r"`messages\[0\].content` is text, not null"),
        ({"messages": [message("user", [{"type": "image_url"}])]}, "has a part that is not text"),
        ({"messages": [message("user", "\ud800")]}, "half of a surrogate pair"),
        ({"messages": [message("user"), message("system")]}, "system message comes after the first"),
        (
            {"messages": [message("user"), message("assistant"), message("assistant")]},
            "two assistant messages follow each other",
        ),
        (
            {"messages": [message("user"), message("assistant"), message("user"), message("user")]},
            "two user messages follow each other",
        ),
        ({"turns": "hi"}, "`turns` is a list, not text"),
        ({"turns": []}, "first message after the system message is not the user's"),
        ({"turns": ["hi", 3]}, r"`turns\[1\]` is text, not a number"),
        ({"turns": ["hi"], "finish": "error"}, "`finish` is"),
    ],
)
def test_a_bad_row_is_refused_in_one_sentence(row, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        parse_conversation(row)
    assert "\n" not in str(caught.value)


def test_reading_keeps_order_and_names_file_and_line_of_bad_rows(tmp_path):
    file = tmp_path / "chat.jsonl"
    good = json.dumps({"turns": ["Hi\u2028there"]}, ensure_ascii=False)
    file.write_bytes(f'\ufeff{good}\n\n{{"turns": [\n'.encode() + b'\xff{}\n{"turns": []}\n' + good.encode())
    items = list(read_conversations(file))
    assert [type(item) for item in items] == [Conversation, BadRow, BadRow, BadRow, Conversation]
    assert [item.where for item in items] == [f"{file}:{line}" for line in (1, 3, 4, 5, 6)]
    assert items[0].prompts == ("Hi\u2028there",)
    assert items[1].error.startswith(f"{file}:3: the line is not JSON")
    assert items[2].error == f"{file}:4: the line is not UTF-8"
    assert items[3].error.startswith(f"{file}:5: the first message")
    assert [item.text for item in items[1:4]] == ['{"turns": [', "\\xff{}", '{"turns": []}']


def test_nesting_beyond_the_parser_is_a_bad_row(tmp_path):
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000)
    (item,) = read_conversations(file)
    assert isinstance(item, BadRow)


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_rows(tmp_path / "nothing.jsonl"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "turns",
                    "role",
                    "content",
                    "from",
                    "value",
                    "system",
                    "tools",
                    "tool_calls",
                ]
            ),
            inner | st.sampled_from(["user", "assistant", "system", "tool"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


any_lines = st.binary(max_size=30).map(lambda line: b"x" + line.replace(b"\n", b""))
json_lines = json_values.map(lambda value: json.dumps(value).encode())


@given(lines=st.lists(any_lines | json_lines, max_size=5))
def test_no_line_is_lost_and_none_crashes(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("any") / "chat.jsonl"
    file.write_bytes(b"\n".join(lines))
    items = list(read_conversations(file))
    assert [item.where for item in items] == [f"{file}:{number + 1}" for number in range(len(lines))]
    assert all(isinstance(item, Conversation | BadRow) for item in items)
