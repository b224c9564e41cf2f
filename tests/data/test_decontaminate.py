import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.decontaminate import TestSets, strings_in
from dspark_jax.data.words import normalised_words

TEST = "The quick brown fox jumps over the lazy dog near the old river bank"


def test_ten_shared_words_are_enough_and_nine_are_not():
    tests = TestSets([TEST])
    words = TEST.split()
    assert (
        tests.shared_run("So " + " ".join(words[2:12]) + " indeed") == "brown fox jumps over the lazy dog near the old"
    )
    assert tests.shared_run("So " + " ".join(words[2:11]) + " indeed") is None
    assert tests.shared_run("THE QUICK, brown fox; jumps over the lazy -- dog near!") is not None


def test_short_test_texts_match_as_a_whole_only():
    tests = TestSets(["What is two plus two?", "user"])
    assert tests.shared_run("what is two plus two") is not None
    assert tests.shared_run("Tell me what is two plus two") is None
    assert tests.shared_run("user") is None


words = st.lists(st.sampled_from("abcd"), max_size=16)


@given(test=words, text=words)
def test_the_index_is_the_definition(test, text):
    def runs(items):
        return {tuple(items[i : i + 3]) for i in range(len(items) - 2)}

    found = TestSets([" ".join(test)], run=3).shared_run(" ".join(text)) is not None
    assert found == bool(runs(test) & runs(text))


def test_files_are_read_whole_whatever_their_fields(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": 3, "nested": [{"question": TEST}]}) + "\n")
    plain = tmp_path / "plain.txt"
    plain.write_text("one two three four five six seven\neight nine ten eleven")
    tests = TestSets.read([rows, plain])
    assert tests.shared_run(TEST)
    assert tests.shared_run("two three four five six seven eight nine ten eleven")
    assert len(tests) == len(normalised_words(TEST)) - 9 + 2


def test_an_unreadable_test_row_stops_everything(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "fine"}\n{"question": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the line is not JSON .*; test files must be readable"):
        TestSets.read([rows])


def test_all_strings_of_a_value_in_order():
    assert list(strings_in({"a": ["x", {"b": "y"}], "c": "z", "d": 3})) == ["x", "y", "z"]
