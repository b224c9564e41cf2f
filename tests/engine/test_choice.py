"""From rounds to text, finish reason and counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.decoding.slots import Sampling, SlotRound
from dspark_jax.engine.choice import ChoiceStats, ChoiceWriter, Piece
from dspark_jax.engine.request import ChoiceRequest

EOS = 0


@pytest.fixture
def write(byte_tokenizer):
    """Feeds rounds of (tokens, accepted) until the choice ends; all pieces, the finish and the counts."""

    def run(rounds, *, stop=(), max_tokens=100, proposed=4):
        choice = ChoiceRequest(index=0, prompt=(1,), sampling=Sampling(), max_tokens=max_tokens, stop=stop)
        writer = ChoiceWriter(choice, detokenizer=byte_tokenizer.stream(), stop_ids={EOS})
        pieces = []
        for tokens, accepted in rounds:
            progress = writer.feed(
                SlotRound(
                    handle=0,
                    tokens=tuple(tokens),
                    proposed=proposed,
                    verified=proposed,
                    accepted=accepted,
                    confidence=(),
                )
            )
            pieces.extend(progress.pieces)
            assert (progress.finish is None) == (progress.stats is None)
            if progress.finish is not None:
                return pieces, progress.finish, progress.stats
        return pieces, None, None

    return run


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def test_a_stop_id_ends_the_text_and_the_rest_of_the_round_is_dropped(write):
    pieces, finish, stats = write([(b"ab", 1), (b"c\0xy", 3)])
    assert text_of(pieces) == "abc"
    assert finish == "stop"
    # a and c were drafts, b was not; of 8 verified drafts 2 were delivered.
    assert stats == ChoiceStats(tokens=3, accepted=2, rejected=6, rounds=2, committed=6)


def test_max_tokens_cuts_inside_a_round(write):
    pieces, finish, stats = write([(b"abc", 2), (b"defg", 3)], max_tokens=5)
    assert text_of(pieces) == "abcde"
    assert finish == "length"
    assert stats == ChoiceStats(tokens=5, accepted=4, rejected=4, rounds=2, committed=7)


def test_a_stop_id_right_after_the_last_token_comes_too_late(write):
    _, finish, stats = write([(b"ab\0", 2)], max_tokens=2)
    assert finish == "length"
    assert stats.tokens == 2


def test_a_stop_string_across_rounds_is_not_delivered_and_not_counted(write):
    pieces, finish, stats = write([(b"say EN", 2), (b"D and", 1)], stop=("END",))
    assert text_of(pieces) == "say "
    assert finish == "stop"
    assert stats.tokens == 4
    assert stats.accepted == 2


def test_a_stop_string_at_the_very_start_delivers_nothing(write):
    pieces, finish, stats = write([(b"END", 2)], stop=("END",))
    assert pieces == []
    assert finish == "stop"
    assert (stats.tokens, stats.accepted) == (0, 0)


def test_text_held_for_a_stop_string_comes_when_the_choice_ends(write):
    assert text_of(write([(b"an EN\0", 3)], stop=("END",))[0]) == "an EN"
    assert text_of(write([(b"an EN", 3)], stop=("END",), max_tokens=5)[0]) == "an EN"


def test_pieces_say_which_text_was_drafted(write):
    pieces, _, _ = write([(b"abC", 2), (b"deF", 2), (b"G\0", 0)])
    assert pieces == [
        Piece(text="ab", drafted=True),
        Piece(text="C", drafted=False),
        Piece(text="de", drafted=True),
        Piece(text="F", drafted=False),
        Piece(text="G", drafted=False),
    ]


def test_held_text_keeps_its_origin(write):
    pieces, _, _ = write([(b"aE", 1), (b"Nx", 1), (b"\0", 0)], stop=("END",))
    assert [(piece.text, piece.drafted) for piece in pieces] == [("a", True), ("E", False), ("N", True), ("x", False)]


def test_a_cut_character_is_delivered_as_the_replacement_mark(write):
    pieces, finish, stats = write([("é".encode(), 1)], max_tokens=1)
    assert text_of(pieces) == "\ufffd"
    assert (finish, stats.tokens) == ("length", 1)


def test_the_replacement_mark_can_complete_a_stop_string(write):
    pieces, finish, stats = write([(b"a\xc3", 1)], stop=("\ufffd",), max_tokens=2)
    assert text_of(pieces) == "a"
    assert finish == "stop"
    assert stats.tokens == 1


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=5), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_counts_and_text_agree_with_the_tokens_laid_out_flat(rounds, max_tokens):
    from_rounds = [
        (token, at < min(accepted, len(tokens) - 1)) for tokens, accepted in rounds for at, token in enumerate(tokens)
    ]
    flat = []
    for token, drafted in from_rounds:
        if token == EOS or len(flat) == max_tokens:
            break
        flat.append((token, drafted))
    ended = len(flat) == max_tokens or any(token == EOS for token, _ in from_rounds)
    rounds = [(tokens, min(accepted, len(tokens) - 1)) for tokens, accepted in rounds]
    choice = ChoiceRequest(index=0, prompt=(1,), sampling=Sampling(), max_tokens=max_tokens)
    writer = ChoiceWriter(choice, detokenizer=WholeStream(), stop_ids={EOS})
    text, last = "", None
    for tokens, accepted in rounds:
        last = writer.feed(
            SlotRound(handle=0, tokens=tuple(tokens), proposed=4, verified=4, accepted=accepted, confidence=())
        )
        text += last.text
        if last.finish:
            break
    assert (last.finish is not None) == ended
    if ended:
        assert text == "".join(chr(token) for token, _ in flat)
        assert last.stats.tokens == len(flat)
        assert last.stats.accepted == sum(drafted for _, drafted in flat)
        assert last.finish == ("length" if len(flat) == max_tokens else "stop")


class WholeStream:
    """One character a token."""

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""
