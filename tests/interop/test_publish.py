"""A directory is whole or not there, and nobody's files are lost."""

import pytest

from dspark_jax.interop.publish import whole_directory


def contents(directory):
    return {file.name: file.read_text() for file in directory.iterdir()}


def test_it_appears_with_everything_and_is_readable_by_others(tmp_path):
    final = tmp_path / "deep" / "final"
    with whole_directory(final) as partial:
        (partial / "a").write_text("1")
        (partial / "a").chmod(0o600)
        assert not final.exists()
    assert contents(final) == {"a": "1"}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a").write_text("1")
    assert final.stat().st_mode == plain.stat().st_mode
    assert (final / "a").stat().st_mode == (plain / "a").stat().st_mode
    assert list(final.parent.iterdir()) == [final]


def fail_half_way(final):
    with whole_directory(final) as partial:
        (partial / "a").write_text("new")
        raise RuntimeError


def test_an_error_leaves_the_old_one_and_no_remains(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    (final / "a").write_text("old")
    with pytest.raises(RuntimeError):
        fail_half_way(final)
    assert contents(final) == {"a": "old"}
    assert list(tmp_path.iterdir()) == [final]


def test_it_replaces_its_predecessor(tmp_path):
    final = tmp_path / "final"
    for text in ("old", "new"):
        with whole_directory(final) as partial:
            (partial / "a").write_text(text)
    assert contents(final) == {"a": "new"}
    assert list(tmp_path.iterdir()) == [final]


def test_other_files_are_never_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"), whole_directory(tmp_path) as partial:
        (partial / "a").write_text("1")
    assert contents(tmp_path) == {"thesis.tex": "years of work"}


def test_a_calibration_goes_with_what_it_was_made_from(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    for name in ("a", "calibration.json", "reliability.png"):
        (final / name).write_text("old")
    with whole_directory(final) as partial:
        (partial / "a").write_text("new")
    assert contents(final) == {"a": "new"}


def test_a_file_is_not_replaced_by_a_directory(tmp_path):
    (tmp_path / "final").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"), whole_directory(tmp_path / "final"):
        pass
