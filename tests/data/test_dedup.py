from random import Random

import numpy as np

from dspark_jax.data.dedup import Deduplicator, jaccard
from dspark_jax.data.words import normalised_words

WORDS = [f"w{i}" for i in range(400)]


def slow_similarity(a, b):
    shingles = [{tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in map(normalised_words, (a, b))]
    return len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])


def test_exact_duplicates_go_whatever_their_case_and_punctuation():
    seen = Deduplicator(threshold=2.0)
    assert seen.is_new("Tell me a joke about cats")
    assert not seen.is_new("tell me a JOKE, about cats!")
    assert seen.is_new("Tell me a joke about dogs")


def test_near_duplicates_are_those_of_the_definition():
    random = Random(0)
    for trial in range(60):
        words = random.choices(WORDS, k=40)
        changed = list(words)
        for place in random.sample(range(40), trial % 12):
            changed[place] = random.choice(WORDS)
        a, b = " ".join(words), " ".join(changed)
        similarity = slow_similarity(a, b)
        seen = Deduplicator(threshold=0.6)
        seen.is_new(a)
        if similarity < 0.6:
            assert seen.is_new(b)
        elif similarity > 0.7:
            assert not seen.is_new(b)


def test_texts_found_different_are_remembered_and_duplicates_are_not_counted_twice():
    seen = Deduplicator(threshold=0.5)
    random = Random(1)
    texts = [" ".join(random.choices(WORDS, k=30)) for _ in range(50)]
    assert all(seen.is_new(text) for text in texts)
    assert not any(seen.is_new(text + " more") for text in texts)


def test_templates_with_new_numbers_are_told_apart_on_request():
    a, b = (f"A bakery sells {n} muffins on each day of the week. How many are that?" for n in (12, 13))
    strict, exact = Deduplicator(threshold=0.5), Deduplicator(threshold=0.5)
    assert (strict.is_new(a), strict.is_new(b)) == (True, False)
    assert (exact.is_new(a, exact_only=True), exact.is_new(b, exact_only=True)) == (True, True)
    assert not exact.is_new(b, exact_only=True)


def test_short_and_empty_texts_have_a_signature_too():
    seen = Deduplicator(threshold=0.6)
    assert [seen.is_new(text) for text in ("Why", "Why?", "How", "", "...")] == [True, False, True, True, False]


def test_jaccard():
    assert jaccard(np.array([1, 2, 3]), np.array([2, 3, 4])) == 0.5
