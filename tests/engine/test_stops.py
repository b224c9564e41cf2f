"""Stop strings against a reference that looks at the text one character at a time."""

from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.engine.stops import StopFilter

letters = st.text(alphabet="ab\n", max_size=24)
words = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=3)
sizes = st.lists(st.integers(0, 5), max_size=40)


def reference(text, stop):
    """Text before the stop string that completes first (the longest of those), and whether there is one."""
    for end in range(1, len(text) + 1):
        matches = [word for word in stop if text[:end].endswith(word)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def pieces_of(text, sizes):
    for size in sizes:
        yield text[:size]
        text = text[size:]
    yield text


@given(letters, words, sizes)
def test_what_comes_out_is_the_reference_however_the_text_arrives(text, stop, sizes):
    filter_ = StopFilter(stop)
    out = "".join(filter_.push(piece) for piece in pieces_of(text, sizes)) + filter_.flush()
    assert (out, filter_.stopped) == reference(text, stop)
    assert not any(word in out for word in stop)


@given(letters, words, sizes)
def test_only_text_that_may_become_a_stop_string_is_held_back(text, stop, sizes):
    filter_, seen, out = StopFilter(stop), "", ""
    for piece in pieces_of(text, sizes):
        seen += piece
        out += filter_.push(piece)
        if filter_.stopped:
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(word.startswith(held) and word != held for word in stop)
        longer = seen[len(out) - 1 :] if out else ""
        assert not any(word != longer and word.startswith(longer) for word in stop if longer)


def test_nothing_comes_out_after_a_stop():
    filter_ = StopFilter(["END"])
    assert filter_.push("text EN") == "text "
    assert filter_.push("D more") == ""
    assert filter_.stopped
    assert filter_.push("and more") == ""
    assert filter_.flush() == ""


def test_without_stop_strings_text_passes_at_once():
    filter_ = StopFilter([])
    assert filter_.push("text") == "text"
    assert filter_.flush() == ""
