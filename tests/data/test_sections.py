import pytest

from dspark_jax.data.sections import parse_sections, shipped_sections


def test_sections_comments_and_blank_lines():
    text = "# note\n[a]\none\n\n  two words \n[b]\nthree\n[a]\nfour\n"
    assert parse_sections(text, "f") == {"a": ("one", "two words", "four"), "b": ("three",)}


def test_faults_name_file_and_line():
    with pytest.raises(ValueError, match=r"f\.txt:2: a \[section\] must come before"):
        parse_sections("\nlost\n[a]\none", "f.txt")
    with pytest.raises(ValueError, match=r"f\.txt: section \[a\] is empty"):
        parse_sections("[a]\n[b]\none", "f.txt")


def test_the_shipped_seeds_are_many_distinct_and_open_ended():
    sections = shipped_sections("seeds.txt")
    seeds = [seed for phrases in sections.values() for seed in phrases]
    assert len(seeds) >= 120
    assert len(set(seeds)) == len(seeds)
    assert all(1 <= len(seed.split()) <= 9 for seed in seeds)
    assert len(shipped_sections("follow_ups.txt")["follow-ups"]) > 20
