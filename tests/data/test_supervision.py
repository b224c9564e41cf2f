import numpy as np
import pytest

from dspark_jax.data.chat import BadRow, parse_conversation
from dspark_jax.data.supervision import supervise, supervise_all

STOP = frozenset({2})


def conversation(*contents, system=None, finish="stop"):
    """Alternating user and assistant messages."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    row = {"messages": messages, "finish": finish} | ({"system": system} if system else {})
    return parse_conversation(row, "chat.jsonl:7")


def learnt(tokenizer, supervised):
    """The supervised tokens as text, the end of a turn as |."""
    ids = supervised.tokens[supervised.loss_mask].tolist()
    return "".join("|" if token == 2 else tokenizer.decode([token]) for token in ids)


def test_only_the_answers_and_their_ends_are_learnt(tokenizer):
    supervised = supervise(
        conversation("Hi", "Hello", "More", "Yes", system="Be"), tokenizer, stop_ids=STOP, max_len=99
    )
    assert learnt(tokenizer, supervised) == "Hello|Yes|"
    whole = "system\nBe\nuser\nHi\nassistant\nHello\nuser\nMore\nassistant\nYes"
    assert tokenizer.decode(supervised.tokens.tolist()) == whole
    assert supervised.tokens[-1] == 2
    assert supervised.tokens.dtype == np.int32


def test_a_last_user_turn_without_an_answer_is_left_out(tokenizer):
    supervised = supervise(conversation("Hi", "Hello", "More"), tokenizer, stop_ids=STOP, max_len=99)
    assert learnt(tokenizer, supervised) == "Hello|"
    assert "More" not in tokenizer.decode(supervised.tokens.tolist())


def test_the_end_of_a_cut_answer_is_not_learnt_but_ends_before_it_are(tokenizer):
    cut = supervise(conversation("Hi", "Hello", "More", "Ye", finish="length"), tokenizer, stop_ids=STOP, max_len=99)
    assert learnt(tokenizer, cut) == "Hello|Ye"
    assert tokenizer.decode(cut.tokens.tolist()).endswith("assistant\nYe")


def test_truncation_cuts_tokens_and_mask_alike(tokenizer):
    dialogue = conversation("Hi", "Hello", "More", "Yes")
    whole = supervise(dialogue, tokenizer, stop_ids=STOP, max_len=999)
    first = int(np.argmax(whole.loss_mask))
    for length in range(1, len(whole.tokens) + 2):
        if length <= first:
            with pytest.raises(ValueError, match=f"no token of an answer is left within {length} tokens"):
                supervise(dialogue, tokenizer, stop_ids=STOP, max_len=length)
        else:
            cut = supervise(dialogue, tokenizer, stop_ids=STOP, max_len=length)
            np.testing.assert_array_equal(cut.tokens, whole.tokens[:length])
            np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask[:length])


def test_the_mask_does_not_depend_on_token_values(tokenizer):
    # The user says what the assistant says, and every turn ends with the same token.
    supervised = supervise(conversation("same", "same"), tokenizer, stop_ids=STOP, max_len=99)
    assert learnt(tokenizer, supervised) == "same|"
    assert (supervised.tokens == 2).sum() == 2
    assert supervised.loss_mask[supervised.tokens == 2].tolist() == [False, True]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    class Rewriting(type(tokenizer)):
        def encode_chat(self, messages, add_generation_prompt=True, tools=()):
            last = len(messages) - 1
            kept = [
                m | {"content": "..."} if m["role"] == "assistant" and i < last else m for i, m in enumerate(messages)
            ]
            return super().encode_chat(kept[1:] if len(messages) > 3 else kept, add_generation_prompt)

    with pytest.raises(ValueError, match="does not render the messages before answer 1 as a prefix"):
        supervise(conversation("Hi", "Hello", "More", "Yes"), Rewriting(), stop_ids=STOP, max_len=99)


def test_a_generation_prompt_that_answers_do_not_carry_is_refused(tokenizer):
    class Thinking(type(tokenizer)):
        def encode_chat(self, messages, add_generation_prompt=True, tools=()):
            ids = super().encode_chat(messages, add_generation_prompt)
            return ids + (self.encode("<think>") if add_generation_prompt else [])

    with pytest.raises(ValueError, match="does not render"):
        supervise(conversation("Hi", "Hello"), Thinking(), stop_ids=STOP, max_len=99)


def test_stop_tokens_must_end_answers_and_nothing_else(tokenizer):
    with pytest.raises(ValueError, match=r"ends answer 1 with none of the stop tokens \[77\]"):
        supervise(conversation("Hi", "Hello"), tokenizer, stop_ids=frozenset({77}), max_len=99)

    class Chatml(type(tokenizer)):
        def encode(self, text):
            return super().encode(text.replace("<|im_end|>", "\x02"))

    with pytest.raises(ValueError, match="answer 1 holds a stop token as text"):
        supervise(conversation("Hi", "Say <|im_end|> now"), Chatml(), stop_ids=STOP, max_len=99)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}


def test_of_a_conversation_with_tools_the_calls_and_answers_are_learnt_and_the_results_are_not(tokenizer):
    messages = [
        {"role": "user", "content": "Sum?"},
        CALL,
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Seven"},
    ]
    row = parse_conversation({"messages": messages, "tools": TOOLS})
    ((_, supervised),) = supervise_all([row], tokenizer, stop_ids=STOP, max_len=999)
    call = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
    assert learnt(tokenizer, supervised) == f"{call}|Seven|"
    assert tokenizer.decode(supervised.tokens.tolist()).startswith('tools\n[{"type": "function", "function": {"name')


def test_rows_that_cannot_be_learnt_from_are_handed_back_in_order(tokenizer):
    bad = BadRow(error="chat.jsonl:3: no", text="{")
    unanswered = parse_conversation({"turns": ["Hi"]}, "chat.jsonl:4")
    items = list(supervise_all([conversation("Hi", "Yes"), bad, unanswered], tokenizer, stop_ids=STOP, max_len=99))
    assert learnt(tokenizer, items[0][1]) == "Yes|"
    assert items[1] is bad
    assert items[2].error.startswith("chat.jsonl:4: the conversation has no assistant message")


@pytest.mark.parametrize("refused", [(), ("Never",)])
def test_encoding_many_at_once_gives_what_one_by_one_does(tokenizer, refused):
    class Batched(type(tokenizer)):
        def encode_chat(self, messages, add_generation_prompt=True, tools=()):
            if any(message["content"] in refused for message in messages):
                raise ValueError("the template refuses this")
            return super().encode_chat(messages, add_generation_prompt, tools)

        def encode_chats(self, conversations, add_generation_prompt=True):
            batches.append(len(conversations))
            return [self.encode_chat(messages, add_generation_prompt) for messages in conversations]

    batches = []
    rows = [conversation(f"Q{i}", "A" * i, "More", "Yes", system="Be" if i % 2 else None) for i in range(1, 600)]
    with_tools = parse_conversation({"messages": [{"role": "user", "content": "Sum?"}, CALL], "tools": TOOLS})
    rows += [conversation("Never", "ever"), BadRow(error="bad", text=""), conversation("Hi", "Ho"), with_tools]
    one_by_one = list(supervise_all(rows, tokenizer, stop_ids=STOP, max_len=400))
    together = list(supervise_all(rows, Batched(), stop_ids=STOP, max_len=400))
    assert batches[:2] == [512, 1024]
    assert len(together) == len(one_by_one) == len(rows)
    for number, (expected, found) in enumerate(zip(one_by_one, together, strict=True)):
        if number == 599 and refused:
            assert found.error == "chat.jsonl:7: the template refuses this"
        elif isinstance(expected, BadRow):
            assert found == expected
        else:
            assert found[0] is rows[number]
            np.testing.assert_array_equal(expected[1].tokens, found[1].tokens)
            np.testing.assert_array_equal(expected[1].loss_mask, found[1].loss_mask)
