"""Requests: seeds of choices, budgets, and the choices a request asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import GenerationRequest, RequestLaw, answer_budget, choice_seed

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds, st.integers(0, 127))
def test_a_choice_seed_fits_31_bits_and_is_always_the_same(seed, j):
    assert 0 <= choice_seed(seed, j) < 2**31
    assert choice_seed(seed, j) == choice_seed(seed, j)


@given(seeds)
def test_choices_of_a_request_draw_from_different_seeds(seed):
    assert len({choice_seed(seed, j) for j in range(8)}) == 8


def test_a_small_seed_is_used_as_it_is_so_that_the_text_can_be_made_offline():
    assert choice_seed(7, 0) == 7
    assert choice_seed(2**31, 0) != choice_seed(0, 0)
    assert choice_seed(-1, 0) != choice_seed(2**31 - 1, 0)


def test_choices_go_prompt_by_prompt_and_a_prompt_draws_the_same_alone_and_in_a_list():
    law = RequestLaw(temperature=0.5, top_k=3, top_p=0.9, seed=11)
    listed = GenerationRequest(prompts=((1, 2), (3,)), law=law, n=2).choices(10)
    alone = GenerationRequest(prompts=((3,),), law=law, n=2).choices(10)
    assert [(choice.index, choice.prompt, choice.max_tokens) for choice in listed] == [
        (0, (1, 2), 8),
        (1, (1, 2), 8),
        (2, (3,), 9),
        (3, (3,), 9),
    ]
    assert [choice.sampling for choice in listed[2:]] == [choice.sampling for choice in alone]
    assert listed[0].sampling.seed == 11
    assert listed[0].sampling.top_k == 3
    assert listed[0].sampling.top_p == 0.9


def test_without_a_seed_every_request_is_fresh():
    request = GenerationRequest(prompts=((1,),), law=RequestLaw())
    assert len({request.choices(4)[0].sampling.seed for _ in range(8)}) > 1


def test_a_prompt_counts_once_however_many_choices():
    assert GenerationRequest(prompts=((1, 2), (3,)), law=RequestLaw(), n=5).prompt_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "asked", "budget"), [(9, None, 1), (4, None, 6), (4, 6, 6), (4, 1, 1), (1, None, 9)]
)
def test_the_answer_gets_what_was_asked_for_or_the_rest_of_the_context(prompt, asked, budget):
    assert answer_budget(prompt, asked, 10) == budget


@pytest.mark.parametrize(("prompt", "asked", "numbers"), [(10, None, "10"), (300, 5, "300"), (4, 7, "11")])
def test_what_does_not_fit_is_refused_with_the_numbers(prompt, asked, numbers):
    with pytest.raises(Refusal) as refusal:
        answer_budget(prompt, asked, 10)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.status == 400
    assert "10 tokens" in refusal.value.message
    assert numbers in refusal.value.message


@pytest.mark.parametrize(("seed", "temperature", "pinned"), [(7, 1.0, True), (7, 0.0, False), (None, 1.0, False)])
def test_a_text_that_is_asked_for_by_its_seed_does_not_depend_on_the_load(seed, temperature, pinned):
    request = GenerationRequest(prompts=((1,),), law=RequestLaw(seed=seed, temperature=temperature), n=2)
    assert [choice.sampling.pinned for choice in request.choices(4)] == [pinned] * 2
