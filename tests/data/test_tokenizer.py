"""The streaming decoder against whole decoding, on a byte-level BPE small enough to build here."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from dspark_jax.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the cat sat on the mat", "naïve café, señor", "日本語のテキスト", "😀😃😄 smile"]


def build(directory, template=TEMPLATE):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    names = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build(tmp_path_factory.mktemp("tokenizer")))


def streamed(tokenizer, groups):
    stream = tokenizer.stream()
    return [stream.push(group) for group in groups], stream.flush()


@given(st.text(), st.integers(1, 5))
def test_pieces_join_to_the_whole_text_and_hold_no_half_character(tokenizer, text, size):
    ids = tokenizer.encode(text)
    pieces, rest = streamed(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(pieces) + rest == text
    if "\ufffd" not in text:
        assert rest == ""
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 299), max_size=120))
def test_bytes_that_are_no_text_decode_as_they_do_at_once(tokenizer, ids):
    pieces, rest = streamed(tokenizer, [[i] for i in ids])
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_character_of_four_tokens_appears_once_with_its_last(tokenizer):
    ids = tokenizer.encode("𐍈")
    assert len(ids) == 4
    assert streamed(tokenizer, [[i] for i in ids]) == (["", "", "", "𐍈"], "")


def test_an_answer_cut_inside_a_character_is_flushed_as_a_mark(tokenizer):
    pieces, rest = streamed(tokenizer, [tokenizer.encode("a𐍈")[:-1]])
    assert (pieces, rest) == (["a"], "\ufffd")


def test_an_endless_run_of_bad_bytes_is_not_held_back(tokenizer):
    bad = tokenizer.encode("𐍈")[-1:]
    stream = tokenizer.stream()
    assert "".join(stream.push(bad) for _ in range(50)) == "\ufffd" * 47
    assert stream.flush() == "\ufffd" * 3


def test_chat_template_and_its_generation_prompt(tokenizer):
    rows = [{"role": "user", "content": "the cat"}]
    end, user, assistant = (tokenizer.encode(name)[0] for name in ("<|end|>", "<|user|>", "<|assistant|>"))
    body = [user, *tokenizer.encode("the cat"), end]
    assert tokenizer.encode_chat(rows) == [*body, assistant]
    assert tokenizer.encode_chat(rows, add_generation_prompt=False) == body
    assert tokenizer.eos_id == end
    assert tokenizer.vocab_size == assistant + 1


def test_special_tokens_are_left_out_of_the_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode("the cat<|end|>")) == "the cat"


def test_single_digits_are_split(tokenizer):
    assert len(tokenizer.encode("2024")) == 4


def test_no_template_is_refused(tmp_path):
    plain = load_tokenizer(build(tmp_path, template=None))
    with pytest.raises(ValueError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])


def test_messages_the_template_refuses(tmp_path):
    strict = load_tokenizer(build(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        strict.encode_chat([{"role": "user", "content": "hi"}])


def test_tools_reach_the_template_and_one_that_knows_none_is_refused(tmp_path, tokenizer):
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] }}{% for call in message.tool_calls %}CALL{% endfor %}"
    )
    (tmp_path / "knows").mkdir()
    knows = load_tokenizer(build(tmp_path / "knows", template=template))
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    ids = knows.encode_chat([{"role": "user", "content": "hi"}, call], tools=tools)
    assert knows.decode(ids) == "addhiCALL"
    for messages, offered in (([{"role": "user", "content": "hi"}], tools), ([call], ())):
        with pytest.raises(ValueError, match="knows no tools"):
            tokenizer.encode_chat(messages, tools=offered)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    file = build(tmp_path) / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
