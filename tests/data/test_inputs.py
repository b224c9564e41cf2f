"""The same rows come out of every kind of input, and what cannot be read is said in one sentence."""

import json
import sys

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from dspark_jax.data.inputs import read_input

ROWS = [
    {"conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "A"}], "source": "x"}
    for i in range(3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of two splits, as it would lie on the Hub."""
    folder = tmp_path_factory.mktemp("inputs") / "blend"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_folder_a_table_and_a_file_give_the_same_rows(folder, tmp_path):
    table = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    for name in (folder, table, folder / "train.jsonl"):
        rows = list(read_input(str(name)))
        assert [row.value for row in rows] == ROWS
        assert [row.where for row in rows] == [f"{name}:{number}" for number in (1, 2, 3)]
        assert [json.loads(row.text) for row in rows] == ROWS
    assert [row.value for row in read_input(str(folder), split="test")] == ROWS[:1]


def test_what_a_row_leaves_empty_in_a_table_is_left_out(tmp_path):
    table = tmp_path / "rows.parquet"
    rows = [
        {"turns": ["a"]},
        {"messages": [{"role": "assistant", "calls": [{"arguments": {"city": "Rome"}}, {"arguments": {"day": 2}}]}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist([rows[0] | {"messages": None}, rows[1] | {"turns": None}]), table)
    assert [row.value for row in read_input(str(table))] == rows


def test_a_data_set_that_was_saved_is_read_by_split(tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    datasets.Dataset.from_list(ROWS).save_to_disk(one)
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(several)
    assert [row.value for row in read_input(str(one))] == ROWS
    assert [row.value for row in read_input(str(several), split="test")] == ROWS[:1]
    with pytest.raises(
        ValueError, match=r"several cannot be read as a data set \(it has no split x, but train, test\)"
    ):
        next(read_input(str(several), split="x"))


def test_a_json_array_is_its_entries(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    rows = list(read_input(str(file)))
    assert [row.value for row in rows] == ROWS
    assert rows[2].where == f"{file}:[3]"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row.value for row in read_input(str(file))] == ROWS
    file.write_text("[1,")
    with pytest.raises(ValueError, match=r"rows.json is not JSON \("):
        next(read_input(str(file)))


def test_a_broken_table_is_one_sentence_and_nothing_else(tmp_path, capfd):
    table = tmp_path / "rows.parquet"
    table.write_text("nope")
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as a data set \(Parquet file size is 4 bytes"):
        next(read_input(str(table)))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_file_is_no_data_set(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=f"there is no file .*none.{suffix}"):
        next(read_input(str(tmp_path / f"none.{suffix}")))


def test_a_data_set_that_cannot_be_read_is_one_sentence(folder):
    with pytest.raises(ValueError, match=r"blend cannot be read as a data set \(Bad split: missing") as caught:
        next(read_input(str(folder), split="missing"))
    assert "\n" not in str(caught.value)


def test_without_the_library_the_way_to_get_it_is_said(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'dspark-jax\[datasets\]'"):
        next(read_input(str(folder)))
    assert len(list(read_input(str(folder / "train.jsonl")))) == 3
