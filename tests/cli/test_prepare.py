import json

import numpy as np
import pytest

from dspark_jax.cli.main import main
from dspark_jax.data.store import held_out, prompt_hash


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path):
    """ShareGPT rows as Open-PerfectBlend has them: 200 questions, each asked again in capitals, and two bad lines."""
    file = tmp_path / "blend.jsonl"
    asked = [f"How heavy is number {i} of the {i * 7} stones?" for i in range(200)]
    talks = [[{"from": "human", "value": text}, {"from": "gpt", "value": "Heavy."}] for text in asked]
    talks += [
        [{"from": "human", "value": f"{text.upper()}"}, *more] for text, (_, *more) in zip(asked, talks, strict=True)
    ]
    lines = [json.dumps({"conversations": talk, "source": "stones"}) for talk in talks]
    file.write_text("\n".join([*lines, "nonsense", '{"conversations": []}']) + "\n")
    return file


def test_prompts_are_written_once_and_split_as_training_splits(source, tmp_path, capsys):
    out = tmp_path / "prompts.jsonl"
    command = ["data", "prepare", "--in", str(source), "--out", str(out), "--near-duplicates", "2"]
    assert main([*command, "--validation", "0.2"]) == 0
    train, validation = rows(out), rows(tmp_path / "prompts.validation.jsonl")
    assert len(train) + len(validation) == 200
    assert 20 < len(validation) < 60
    for side, prompts in enumerate((train, validation)):
        assert all(row["source"] == "stones" and len(row["turns"]) == 1 for row in prompts)
        hashes = np.asarray([prompt_hash(row["turns"][0]) for row in prompts], np.uint64)
        assert (held_out(hashes, 0.2, 1) == bool(side)).all()
        # What is left can be split again, by the seed that training has.
        assert held_out(hashes, 0.2, 0).any()
    assert [row["text"] for row in rows(tmp_path / "prompts.rejected.jsonl")] == ["nonsense", '{"conversations": []}']
    said = capsys.readouterr().err
    assert f"{len(train)} prompts; 200 duplicates and 2 bad rows" in said
    assert f"the first: {source}:401: the line is not JSON" in said
    before = train
    assert main([*command, "--validation", "0.2", "--seed", "2"]) == 0
    assert rows(out) != before
    assert main([*command, "--limit", "7"]) == 0
    assert [row["turns"][0][:27] for row in rows(out)] == [f"How heavy is number {i} of th" for i in range(7)]


def test_several_inputs_are_one_and_near_duplicates_go(source, tmp_path):
    other, out = tmp_path / "other.jsonl", tmp_path / "prompts.jsonl"
    other.write_text(json.dumps({"turns": [" ".join(f"w{i}" for i in range(30))]}) + "\n")
    third = tmp_path / "third.jsonl"
    third.write_text(json.dumps({"turns": [" ".join(f"w{i}" for i in range(31))]}) + "\n")
    command = ["data", "prepare", "--in", str(other), str(third), "--out", str(out)]
    assert main(command) == 0
    assert [row["source"] for row in rows(out)] == ["other"]
    assert main([*command, "--near-duplicates", "0.99"]) == 0
    assert [row["source"] for row in rows(out)] == ["other", "third"]


def test_mistakes_are_one_sentence_and_leave_the_old_file(source, tmp_path, capsys):
    out = tmp_path / "prompts.jsonl"
    out.write_text("old\n")
    bad, nothing = tmp_path / "bad.jsonl", tmp_path / "nothing.jsonl"
    bad.write_text('{"text": "a"}\n[]\n')
    nothing.write_text("\n")
    for flags, said in (
        (["--in", str(tmp_path / "no.jsonl")], "there is no file"),
        (["--in", str(source), "--validation", "1"], "validation is a share"),
        (["--in", str(source), "--limit", "1", "--validation", "0.5"], "1 prompts are too few to hold out 0.5"),
        (["--in", str(source), "--near-duplicates", "0"], "a similarity above 0"),
        (["--in", str(out)], "write to another file"),
        (["--in", str(nothing)], f"no usable prompt among the 0 rows of {nothing}"),
        (
            ["--in", str(bad)],
            f"no usable prompt among the 2 rows of {bad}; the first is not, because {bad}:1: the row has",
        ),
        (["--in", str(source), "--out", str(tmp_path)], f"{tmp_path} is a directory: give the name of a file"),
        (["--in", str(source), "--out", str(out / "x")], f"{out} is a file, so {out / 'x'} cannot be written"),
    ):
        assert main(["data", "prepare", "--out", str(out), *flags]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert out.read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == {
        "bad.jsonl",
        "blend.jsonl",
        "nothing.jsonl",
        "prompts.jsonl",
    }
