from random import Random

import pytest

from dspark_jax.data.decontaminate import TestSets
from dspark_jax.data.journal import Journal
from dspark_jax.data.prompts import (
    SeededPrompts,
    Selection,
    add_procedural,
    opening,
    read_seeds,
    shuffled,
    wanted_prompts,
)
from dspark_jax.data.recipe import DataRecipe, ProceduralCounts, SeededCounts

STOP = frozenset({2})
NONE = SeededCounts(**dict.fromkeys(SeededCounts.__dataclass_fields__, 0))
COUNTS = SeededCounts(**{**vars(NONE), "maths": 12, "everyday": 5})


def recipe(**changes):
    settings = {"seeded": COUNTS, "procedural": ProceduralCounts(maths=3, logic=2, code=4), "follow_ups": 0.0}
    return DataRecipe(**(settings | changes))


def babble(request):
    """A proper ending of some ten random words, different for each request."""
    random = Random(request.seed)
    return " word " + " ".join("".join(random.choices("abcdefgh", k=6)) for _ in range(10)) + "?"


@pytest.fixture
def synthesize(tmp_path, tokenizer, model):
    def run(settings, reply=babble, tests=(), width=3, stop_after=None):
        selection = Selection(settings, TestSets(tests))
        generate = model(reply, width=width)
        with Journal(tmp_path / "attempts.jsonl") as journal:
            seeded = SeededPrompts(
                settings, selection, generate=generate, tokenizer=tokenizer, stop_ids=STOP, journal=journal
            )
            for count, _ in enumerate(seeded.run(), start=1):
                if count == stop_after:
                    return selection
        run.asked = generate.asked
        return selection

    return run


def test_the_wanted_numbers_are_reached_and_prompts_begin_with_their_seeds(synthesize):
    selection = synthesize(recipe(instructions=0.0))
    assert selection.counts == {"seeded/maths": 12, "seeded/everyday": 5}
    seeds = read_seeds(recipe())
    for prompt in selection.kept:
        (text,) = prompt.turns
        assert any(text.startswith(seed + " word") for seed in seeds[prompt.source.removeprefix("seeded/")])
        assert text.endswith("?")


def test_the_model_continues_an_open_user_turn(synthesize, tokenizer):
    assert tokenizer.decode(opening("A store sells", tokenizer, STOP)) == "user\nA store sells"
    synthesize(recipe())
    assert all(request.prompt[-1] != 2 for request in synthesize.asked)
    assert {request.temperature for request in synthesize.asked} == {0.8, 0.9, 1.0}
    assert len({request.seed for request in synthesize.asked}) == len(synthesize.asked)


def test_seeds_take_turns_in_an_order_that_changes(synthesize, tokenizer, tmp_path):
    file = tmp_path / "seeds.txt"
    file.write_text("[maths]\n" + "\n".join(f"Seed {letter}" for letter in "ABCDEF"))
    synthesize(recipe(seeds=str(file), seeded=SeededCounts(**{**vars(NONE), "maths": 30})), width=1)
    used = [tokenizer.decode(request.prompt)[-1] for request in synthesize.asked]
    passes = ["".join(used[start : start + 6]) for start in range(0, 30, 6)]
    assert {"".join(sorted(each)) for each in passes} == {"ABCDEF"}
    assert len(set(passes)) > 1


def test_a_template_that_cannot_be_continued_is_refused(tokenizer):
    with pytest.raises(ValueError, match="does not end a user's turn with a stop token"):
        opening("A store sells", tokenizer, frozenset({99}))


def test_a_rerun_keeps_the_same_prompts_whatever_finished_first(synthesize, tmp_path):
    def fussy(request):
        return " no" if request.seed % 3 == 0 else babble(request)

    whole = synthesize(recipe(), fussy)
    asked = len(synthesize.asked)
    (tmp_path / "attempts.jsonl").unlink()
    synthesize(recipe(), fussy, width=7, stop_after=9)
    again = synthesize(recipe(), fussy, width=1)
    assert len(synthesize.asked) == asked - 9
    assert again.kept == whole.kept
    assert again.dropped == whole.dropped


def test_another_recipe_does_not_take_the_texts_of_this_one(synthesize):
    synthesize(recipe())
    asked = len(synthesize.asked)
    synthesize(recipe(seed=1))
    assert len(synthesize.asked) == asked


def test_bad_texts_are_counted_and_replaced_by_others(synthesize):
    def mixed(request):
        kind = request.seed % 4
        return [" and so on", "? ?", babble(request), babble(request)][kind]

    selection = synthesize(recipe(), mixed)
    assert selection.counts == {"seeded/maths": 12, "seeded/everyday": 5}
    assert selection.dropped["does not end properly"] > 0


def test_attempts_end_although_the_model_writes_nothing_usable(synthesize):
    selection = synthesize(recipe(attempts=2.0), lambda request: " no")
    assert selection.kept == []
    assert len(synthesize.asked) == 2 * (12 + 5)
    assert selection.dropped == {"does not end properly": 34}


def test_a_text_that_hits_the_token_limit_is_not_used(synthesize):
    selection = synthesize(recipe(attempts=1.0), lambda request: " what is it" + "?" * 400)
    assert selection.dropped == {"does not end properly": 17}


def test_nothing_that_shares_ten_words_with_a_test_set_is_kept(synthesize):
    test = "one two three four five six seven eight nine ten eleven?"
    selection = synthesize(recipe(attempts=1.0), lambda request: f" {test}", tests=[test])
    assert selection.dropped == {"shares a run of words with a test set": 17}


def test_follow_ups_and_instructions_are_added_in_their_shares_and_checked_too(synthesize):
    selection = synthesize(recipe(follow_ups=1.0, instructions=1.0))
    assert {len(prompt.turns) for prompt in selection.kept} == {2}
    for prompt in selection.kept:
        assert ("\n" in prompt.turns[0]) == (prompt.source == "seeded/maths")
    again = synthesize(recipe(follow_ups=1.0), tests=[prompt.turns[1] for prompt in selection.kept])
    assert again.dropped["shares a run of words with a test set"] > 0


def test_near_duplicates_are_dropped(synthesize):
    selection = synthesize(
        recipe(attempts=1.0), lambda request: f" {' '.join('abcdefghijklmnopqrstuvwxyz')} x{request.seed}?"
    )
    assert selection.dropped["is a duplicate"] > 5


def test_procedural_prompts_fill_their_numbers_and_avoid_test_sets(synthesize):
    selection = Selection(recipe(), TestSets([]))
    add_procedural(recipe(), selection)
    assert selection.counts == {"procedural/maths": 3, "procedural/logic": 2, "procedural/code": 4}
    text = selection.kept[0].turns[0]
    other = Selection(recipe(), TestSets([text]))
    add_procedural(recipe(), other)
    assert text not in [prompt.turns[0] for prompt in other.kept]
    assert other.counts == selection.counts


def test_shuffling_keeps_every_prompt_and_mixes_the_sources():
    settings = recipe(procedural=ProceduralCounts(maths=30, logic=0, code=30))
    selection = Selection(settings, TestSets([]))
    add_procedural(settings, selection)
    mixed = shuffled(selection.kept, 0)
    assert sorted(map(repr, mixed)) == sorted(map(repr, selection.kept))
    assert len({prompt.source for prompt in mixed[:20]}) == 2
    assert wanted_prompts(settings) == 12 + 5 + 60


def test_the_shipped_seeds_serve_the_default_recipe():
    assert set(read_seeds(DataRecipe())) == set(SeededCounts.__dataclass_fields__)


def test_seeds_of_ones_own_must_have_the_sections_wanted(tmp_path):
    file = tmp_path / "seeds.txt"
    file.write_text("[maths]\nA shop\n")
    with pytest.raises(ValueError, match=r"has no section \[everyday\]; add it or set seeded\.everyday=0"):
        read_seeds(recipe(seeds=str(file)))
    only_maths = SeededCounts(**{**vars(NONE), "maths": 1})
    assert read_seeds(recipe(seeds=str(file), seeded=only_maths)) == {"maths": ("A shop",)}
