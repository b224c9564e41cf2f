import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import dspark_jax
from dspark_jax.cli import data as verb
from dspark_jax.cli.main import main
from dspark_jax.data.generation import Answer, Request
from dspark_jax.data.recipe import DataRecipe, read_recipe
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.drafters.base import NoDrafter
from dspark_jax.interop.huggingface import load_target

ZEROS = [f"{kind}.{name}=0" for kind in ("seeded", "procedural") for name in vars(getattr(DataRecipe(), kind))]


class Chatml:
    """One token a character; \\x01 and \\x02 begin and end a turn."""

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(chr(token) for token in ids if token > 2)

    def encode_chat(self, messages, add_generation_prompt=True, tools=()):
        turns = "".join(f"\x01{message['role']}\n{message['content']}\x02\n" for message in messages)
        return self.encode(turns + ("\x01assistant\n" if add_generation_prompt else ""))


@dataclass
class FakeModel:
    tokenizer = Chatml()
    stop_ids = frozenset({2})
    max_len = 500


@pytest.fixture
def answered(monkeypatch):
    """The model answers everything alike; the fixture is the list of what it was asked."""
    asked = []

    def generator(slots, stop_ids):
        def run(requests):
            for request in requests:
                asked.append(request)
                number = len(asked)
                text = f" x{number} y{number} z{number} of all the things?"
                yield Answer(request=request, tokens=tuple(map(ord, text)), finish="stop")

        return run

    monkeypatch.setattr(verb, "load_model", lambda args, say: FakeModel())
    monkeypatch.setattr(verb, "_slots", lambda model, args: None)
    monkeypatch.setattr(verb, "_generator", generator)
    return asked


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(*assignments):
    return [item for assignment in (*ZEROS, *assignments) for item in ("--set", assignment)]


def test_synthesize_writes_prompts_and_the_recipe_that_makes_them_again(tmp_path, answered, capsys):
    out = tmp_path / "prompts.jsonl"
    flags = settings("seeded.everyday=4", "procedural.code=3", "follow_ups=0", "seed=5")
    assert main(["data", "synthesize", "--out", str(out), *flags]) == 0
    first = out.read_text()
    assert len(rows(out)) == 7
    assert {row["source"] for row in rows(out)} == {"seeded/everyday", "procedural/code"}
    assert all(len(row["turns"]) == 1 for row in rows(out))
    assert "7 prompts of 7 wanted" in capsys.readouterr().err
    recipe = tmp_path / "prompts.recipe.json"
    assert read_recipe(recipe).seed == 5
    answered.clear()
    assert main(["data", "synthesize", "--out", str(out), "--recipe", str(recipe)]) == 0
    assert out.read_text() == first
    assert answered == []


def test_regenerate_answers_every_row_keeps_bad_ones_aside_and_goes_on(tmp_path, answered, capsys):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    source.write_text('{"turns": ["One?"], "source": "mine"}\n{"turns": 3}\nnonsense\n{"turns": ["Two?"]}\n')
    command = ["data", "regenerate", "--in", str(source), "--out", str(out)]
    assert main([*command, "--temperature", "0.5", "--max-new-tokens", "33"]) == 0
    assert [row["messages"][0]["content"] for row in rows(out)] == ["One?", "Two?"]
    assert {row["temperature"] for row in rows(out)} == {0.5}
    assert {request.max_new_tokens for request in answered} == {33}
    rejected = rows(tmp_path / "train.rejected.jsonl")
    assert [row["error"].partition(": ")[0] for row in rejected] == [f"{source}:2", f"{source}:3"]
    said = capsys.readouterr().err
    assert "2 rows answered" in said
    assert "2 rejected" in said
    assert f"{source}:2" in said
    assert "not tried again while that file is there" in said
    answered.clear()
    assert main(command) == 0
    assert answered == []
    assert "0 rows answered with 0 tokens, 4 were done before" in capsys.readouterr().err


def test_what_has_no_rows_to_answer_is_said(tmp_path, answered, capsys):
    empty, table = tmp_path / "empty.jsonl", tmp_path / "rows.parquet"
    for file, said in (
        (empty, "has no rows to answer"),
        (table, "`dspark data prepare --in"),
        (tmp_path, "not a JSONL"),
    ):
        if file is not tmp_path:
            file.write_text("")
        assert main(["data", "regenerate", "--in", str(file), "--out", str(tmp_path / "out.jsonl")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_regenerate_takes_its_settings_from_the_recipe(tmp_path, answered):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    source.write_text('{"turns": ["One?"]}\n')
    flags = ["--set", "answers.temperatures=0.3", "--set", "answers.max_new_tokens=44"]
    assert main(["data", "regenerate", "--in", str(source), "--out", str(out), *flags]) == 0
    assert [(request.temperature, request.max_new_tokens) for request in answered] == [(0.3, 44)]


def test_decontaminate_drops_what_a_test_file_holds_in_questions_or_answers(tmp_path, capsys):
    test = "one two three four five six seven eight nine ten"
    tests, source, out = tmp_path / "test.jsonl", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    tests.write_text(json.dumps({"question": test}) + "\n")
    lines = [
        '{"turns": ["Fine  as it is"],  "id": 1}',
        json.dumps({"turns": [f"Count: {test.upper()}"]}),
        json.dumps({"messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": test}]}),
        '{"prompt": "no conversation"}',
        '{"turns": ["One?"], "score": NaN}',
        "nonsense",
    ]
    source.write_text("\n".join(lines) + "\n")
    assert main(["data", "decontaminate", "--in", str(source), "--out", str(out), "--tests", str(tests)]) == 0
    assert out.read_text() == lines[0] + "\n"
    rejected = rows(tmp_path / "out.rejected.jsonl")
    assert [row["text"] for row in rejected] == lines[1:]
    assert "in.jsonl:2: shares 'one two three" in rejected[0]["error"]
    assert [row["error"].partition(": ")[2][:24] for row in rejected[2:]] == [
        "the row has none of `mes",
        "the line is not JSON (Na",
        "the line is not JSON (Ex",
    ]
    said = capsys.readouterr().err
    assert "1 rows kept; 5 dropped" in said
    assert f"The first of them: {rejected[0]['error']}" in said


def test_recipe_prints_json_that_reads_back(tmp_path, capsys):
    assert main(["data", "recipe", "--set", "seeded.maths=3"]) == 0
    file = tmp_path / "recipe.json"
    file.write_text(capsys.readouterr().out)
    assert read_recipe(file).seeded.maths == 3


def test_mistakes_are_one_sentence(tmp_path, answered, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"turns": ["One?"]}\n')
    for command, said in (
        (["recipe", "--set", "seeded.mathx=3"], "there is no field seeded.mathx"),
        (["recipe", "--recipe", str(tmp_path / "none.json")], "none.json: No such file or directory"),
        (["regenerate", "--in", str(file), "--out", str(file)], "write to another file"),
        (["regenerate", "--in", str(tmp_path / "no"), "--out", str(tmp_path / "o")], "no: No such file or directory"),
        (["regenerate", "--in", str(file), "--out", str(tmp_path / "o"), "--temperature", "-1"], "temperatures are"),
        (
            ["decontaminate", "--in", str(file), "--out", str(tmp_path / "o"), "--tests", "nope.jsonl"],
            "nope.jsonl: No such",
        ),
    ):
        assert main(["data", *command]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert file.read_text() == '{"turns": ["One?"]}\n'


def test_the_model_behind_the_interface_answers_each_request_by_its_own_law():
    target = load_target(Path(dspark_jax.__file__).parent / "pretrained" / "llama_tiny")
    slots = DecodeSlots(target, NoDrafter(), max_batch=2, max_len=64, elastic=False)
    laws = [(0.0, 1.0, 0), (3.0, 1.0, 1), (3.0, 1.0, 2), (3.0, 0.3, 1), (6.0, 1.0, 3)]
    requests = [
        Request(prompt=(3, 4, 5), temperature=t, top_p=p, seed=seed, max_new_tokens=12 + seed, tag=(t, p, seed))
        for t, p, seed in laws
    ]
    answers = {answer.request.tag: answer for answer in verb._generator(slots, frozenset({7}))(iter(requests))}
    jobs = [
        Job(
            prompt=request.prompt,
            sampling=Sampling(temperature=request.temperature, top_p=request.top_p, seed=request.seed),
            max_new_tokens=request.max_new_tokens,
            stop_ids=frozenset({7}),
            tag=request.tag,
        )
        for request in requests
    ]
    expected = {done.job.tag: done for done in generate(slots, jobs)}
    assert set(answers) == set(expected) == set(laws)
    for tag, answer in answers.items():
        assert (answer.tokens, answer.finish) == (expected[tag].tokens, expected[tag].finish)
    assert len({answer.tokens[:12] for answer in answers.values()}) == len(laws)
