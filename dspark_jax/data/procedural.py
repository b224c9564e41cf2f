"""Prompts made by rule: unlimited, seeded, and sharing nothing with any test set but the subject."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

from dspark_jax.data.procedural_code import code_task
from dspark_jax.data.procedural_logic import logic_problem
from dspark_jax.data.procedural_maths import maths_problem

ProceduralKind = Literal["maths", "logic", "code"]

_MAKERS: dict[ProceduralKind, Callable[[Random], str]] = {
    "maths": maths_problem,
    "logic": logic_problem,
    "code": code_task,
}


def procedural_prompts(kind: ProceduralKind, seed: int) -> Iterator[str]:
    """An endless stream of prompts that depends on the kind and the seed alone; it can repeat itself."""
    random = Random(f"{kind}/{seed}")
    while True:
        yield _MAKERS[kind](random)
