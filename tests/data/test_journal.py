import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.journal import Journal, require_writable, write_whole


def write(path, *keys):
    with Journal(path) as journal:
        for key in keys:
            journal.append(key, {"text": f"row {key} — ünï"})


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path):
    file = tmp_path / "folder" / "rows.jsonl"
    with Journal(file) as journal:
        journal.append("a", {"text": "x"})
        assert json.loads(file.read_text()) == {"key": "a", "text": "x"}
        assert journal.keys == {"a"}
    write(file, "b")
    with Journal(file) as journal:
        assert journal.keys == {"a", "b"}
        assert [row["key"] for row in journal.rows()] == ["a", "b"]


@given(cut=st.integers(0, 120))
def test_a_file_cut_anywhere_opens_with_its_whole_rows_and_goes_on(tmp_path_factory, cut):
    file = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    write(file, "a", "b", "c")
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(whole[:cut])
    kept = sum(cut >= sum(map(len, lines[: i + 1])) - 1 for i in range(3))
    with Journal(file) as journal:
        assert journal.keys == set("abc"[:kept])
        for key in "abc"[kept:]:
            journal.append(key, {"text": f"row {key} — ünï"})
    assert file.read_bytes() == whole


def test_a_last_row_longer_than_the_window_is_repaired(tmp_path):
    file = tmp_path / "rows.jsonl"
    write(file, "a")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"key": "b", "text": "' + b"x" * 200_000)
    with Journal(file) as journal:
        assert journal.keys == {"a"}
    assert file.read_bytes() == whole


def test_a_killed_writer_leaves_a_file_to_go_on_with(tmp_path):
    file = tmp_path / "rows.jsonl"
    code = (
        "import itertools, sys\nfrom dspark_jax.data.journal import Journal\n"
        "with Journal(sys.argv[1]) as journal:\n"
        "    for i in itertools.count():\n        journal.append(str(i), {'text': 'x' * 5000})\n"
        "        if i == 20: print('going', flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, cwd=os.getcwd())
    assert writer.stdout.readline() == b"going\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with Journal(file) as journal:
        assert journal.keys == {str(i) for i in range(len(journal.keys))}
        assert len(journal.keys) > 20


def test_two_writers_of_one_file_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    with Journal(file), pytest.raises(BlockingIOError, match="another process is writing"):
        Journal(file)
    write(file, "a")


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text, fault in (
        ('{"turns": ["Hi"]}\n', r"rows\.jsonl:1: the row has no `key`"),
        ('{"key": "a"}\n{"key": \n{"key": "b"}\n', r"rows\.jsonl:2: the line is not JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=fault):
            Journal(file)
        assert file.read_text() == text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "out.jsonl"
    write_whole(file, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_whole(file, "new\n")
    assert file.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    write_whole(file, "new\n")
    assert file.read_text() == "new\n"


def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path, read_only):
    require_writable(tmp_path / "new" / "folder", "choose another")
    assert list(tmp_path.iterdir()) == [], "nothing is made"
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=f"^{tmp_path}/file is a file, not a folder: choose another$"):
        require_writable(tmp_path / "file" / "folder", "choose another")
    read_only(tmp_path)
    with pytest.raises(PermissionError, match=f"^{tmp_path} cannot be written: choose another$"):
        require_writable(tmp_path / "new" / "folder", "choose another")
