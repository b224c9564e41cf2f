from itertools import islice

import pytest

from dspark_jax.data.filters import CONTROL
from dspark_jax.data.procedural import procedural_prompts
from dspark_jax.data.words import normalised

KINDS = ("maths", "logic", "code")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_depend_on_the_seed_alone_and_hardly_repeat(kind):
    first, again, other = (list(islice(procedural_prompts(kind, seed), 1000)) for seed in (0, 0, 1))
    assert first == again
    assert len(set(first) & set(other)) < 150
    assert len({normalised(prompt) for prompt in first}) > 900


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_complete_sentences_without_gaps(kind):
    for prompt in islice(procedural_prompts(kind, 3), 3000):
        text = prompt.replace("\\boxed{}", "")
        assert not set("{}") & set(text)
        assert "None" not in text.replace("or None", "")
        assert prompt == prompt.strip()
        assert len(prompt.split()) >= 3
        assert not CONTROL.search(prompt)
        assert " 1x" not in text
        assert "+ -" not in text


def test_stubs_are_python():
    stubs = [p for p in islice(procedural_prompts("code", 0), 2000) if "```python" in p]
    assert len(stubs) > 100
    for stub in stubs:
        compile(stub.split("```python\n")[1].split("\n```")[0], "stub", "exec")
