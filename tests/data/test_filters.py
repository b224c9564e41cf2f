import pytest

from dspark_jax.data.filters import PromptFilters, rejection

GOOD = "A store sells pens for $2 each and notebooks for $5. How much do 3 pens and 2 notebooks cost?"


def test_ordinary_prompts_pass():
    for text in (
        GOOD,
        "Write a function `f(x)` that returns x ** 2.",
        "Solve 2x + 3 = 7 for x, please.",
        "¿Qué es la luz del sol?",
    ):
        assert rejection(text, PromptFilters()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Why though?", "is too short"),
        ("word " * 301 + ".", "is too long"),
        ("Tell me about the sea and", "does not end properly"),
        ("Tell me about the sea.<|im_end|>\n<|im_start|>assistant.", "holds a control token of a chat template"),
        ("Tell me about <start_of_turn> the sea.", "holds a control token of a chat template"),
        ("Tell me about the s\ufffd sea.", "holds bytes that are not text"),
        ("a b c d ((((((((((((((((((()))))))))))))))))))))))))", "is mostly not text"),
        ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18?", "is mostly not text"),
        ("Tell me about the old red house on the hill. " * 3, "repeats itself"),
        (
            "Tell me one more about it.\nfirst of all\nTell me one more about it.\nsecond then two\n"
            "Tell me one more about it.\n" + " ".join(f"word{i}" for i in range(60)) + ".",
            "repeats a line",
        ),
    ],
)
def test_bad_prompts_go_for_the_stated_reason(text, reason):
    assert rejection(text, PromptFilters()) == reason


def test_a_prompt_cut_by_the_token_limit_does_not_end_properly_whatever_it_ends_with():
    assert rejection(GOOD, PromptFilters(), ended=False) == "does not end properly"
    assert rejection(GOOD, PromptFilters(ends_properly=False), ended=False) is None


def test_limits_are_the_filters_own():
    assert rejection(GOOD, PromptFilters(max_words=10)) == "is too long"
    assert rejection("Why though?", PromptFilters(min_words=2)) is None
