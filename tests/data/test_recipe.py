import json
from dataclasses import replace

import pytest

from dspark_jax.data.filters import PromptFilters
from dspark_jax.data.recipe import DataRecipe, PromptSampling, SeededCounts, read_recipe, recipe_text
from dspark_jax.data.regenerate import Answering


def test_a_written_recipe_reads_back_as_it_was(tmp_path):
    recipe = DataRecipe(
        seeded=SeededCounts(maths=3),
        seeds="mine.txt",
        prompts=PromptSampling(temperatures=(0.5, 1.0)),
        filters=PromptFilters(ends_properly=False),
        decontaminate=("a.jsonl", "b,c.jsonl"),
        answers=Answering(temperatures=(1.0,), loops=None),
        seed=7,
    )
    file = tmp_path / "recipe.json"
    for each in (recipe, DataRecipe()):
        file.write_text(recipe_text(each))
        assert read_recipe(file) == each


def test_what_a_recipe_leaves_out_keeps_its_default_and_whole_numbers_are_numbers(tmp_path):
    file = tmp_path / "recipe.json"
    file.write_text('{"seeded": {"code": 5}, "near_duplicates": 1, "answers": {"temperatures": [0, 1]}}')
    recipe = read_recipe(file)
    assert recipe.seeded == SeededCounts(code=5)
    assert recipe.answers == replace(Answering(), temperatures=(0.0, 1.0))
    assert isinstance(recipe.near_duplicates, float)
    assert recipe.filters == PromptFilters()


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"sede": 1}, r"has no field sede; there are .*seed"),
        ({"seed": "1"}, "seed is of type int, not '1'"),
        ({"seed": True}, "seed is of type int, not True"),
        ({"seeded": 3}, "seeded is an object with the fields of SeededCounts, not 3"),
        ({"seeded": {"math": 3}}, "seeded has no field math"),
        ({"decontaminate": "a.jsonl"}, "decontaminate is a list, not 'a.jsonl'"),
        ({"near_duplicates": float("nan")}, "near_duplicates is of type float, not nan"),
        ({"answers": {"temperatures": [-1]}}, "temperatures are one or more numbers from 0 up"),
        ({"prompts": {"temperatures": [0]}}, "a greedy model writes one prompt a seed"),
        ([], "is an object with the fields of DataRecipe"),
    ],
)
def test_a_wrong_recipe_is_refused_by_field(tmp_path, value, fault):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=fault):
        read_recipe(file)


def test_a_recipe_that_is_not_json_is_refused_by_name(tmp_path):
    file = tmp_path / "recipe.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"recipe\.json is not JSON"):
        read_recipe(file)
