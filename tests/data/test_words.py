from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.words import normalised, normalised_words


def test_case_punctuation_and_spacing_do_not_count():
    assert normalised("What's  2+2,\nTOM?") == normalised("what s 2 2 tom") == "what s 2 2 tom"
    assert normalised("ﬁne Ｗｉｄｅ") == "fine wide"
    assert normalised("snake_case x1") == "snake_case x1"


def test_scripts_without_spaces_give_one_word_a_character():
    assert normalised_words("東京 is big") == ["東", "京", "is", "big"]
    assert normalised_words("abc東") == ["abc", "東"]


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    assert normalised_words(normalised(text)) == normalised_words(text)
