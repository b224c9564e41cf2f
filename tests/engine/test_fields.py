"""Bodies that are no JSON object."""

import pytest

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.fields import parse_object


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b'"hi"', "must be a JSON object, not a string"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b"\xff{}", "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body, words):
    with pytest.raises(Refusal) as raised:
        parse_object(body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")
    assert words in raised.value.message
