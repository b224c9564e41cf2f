import json
import shutil

import numpy as np
import pytest

from dspark_jax.cli.main import main
from dspark_jax.data.shards import PackedRows
from dspark_jax.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def target(chat_target, tmp_path_factory):
    """A tokenizer whose template ends every turn with <eos>; no weights are needed."""
    directory = tmp_path_factory.mktemp("pack") / "target"
    shutil.copytree(chat_target, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    fields = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


@pytest.fixture
def chats(tmp_path):
    """Two files of conversations, one of which cannot be used."""
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for number, file in enumerate(files):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"Q{number}{i}"},
                    {"role": "assistant", "content": "x" * (i + 1)},
                ]
            }
            for i in range(12)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files[1].write_text(files[1].read_text() + '{"turns": ["unanswered"]}\n')
    return [str(file) for file in files]


def pack(chats, target, out, *flags):
    command = ["data", "pack", "--in", *chats, "--target", str(target), "--out", str(out), "--length", "48"]
    return main([*command, "--validation", "0.25", "--shard-rows", "3", *flags])


def test_conversations_of_all_files_are_packed_once(chats, target, tmp_path, capsys):
    out = tmp_path / "packed"
    assert pack(chats, target, out) == 0
    rows = PackedRows.open(out)
    tokenizer = load_tokenizer(target)
    documents = [document for row in range(len(rows)) for document in rows.documents(row)]
    texts = sorted(tokenizer.decode(document.tokens.tolist()) for document in documents)
    assert texts == sorted(f"u:Q{number}{i}a:{'x' * (i + 1)}" for number in range(2) for i in range(12))
    learnt = sorted(tokenizer.decode(document.tokens[document.loss_mask].tolist()) for document in documents)
    assert learnt == sorted("x" * (i + 1) for _ in range(2) for i in range(12))
    assert all(document.tokens[-1] == 1 and document.loss_mask[-1] for document in documents)
    assert rows.manifest["inputs"] == chats
    assert rows.manifest["stop tokens"] == "1"
    assert len(rows.split()[1]) == rows.manifest["rows"]["validation"] > 0
    (rejected,) = map(json.loads, (out / "rejected.jsonl").read_text().splitlines())
    assert "no assistant message" in rejected["error"]
    said = capsys.readouterr().err
    assert f"24 conversations in {len(rows)} rows of 48 tokens" in said
    assert f"{np.sum(rows.lengths) / (48 * len(rows)):.1%} full" in said
    assert "1 rows could not be used" in said


def test_the_same_is_not_packed_again_and_other_files_are_not_overwritten(chats, target, tmp_path, capsys):
    out = tmp_path / "packed"
    assert pack(chats, target, out) == 0
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    capsys.readouterr()
    assert pack(chats, target, out) == 0
    assert "holds these files already" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    # Fewer shards would leave the old ones among the new.
    assert pack(chats, target, out, "--shard-rows", "100") == 2
    assert "holds files that would be lost" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert pack(chats, target, tmp_path / "mine") == 2
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_mistakes_are_one_sentence_and_leave_nothing(chats, target, tmp_path, capsys):
    for flags, said in (
        (["--in", str(tmp_path / "no.jsonl")], "no.jsonl: No such file"),
        (["--in", *chats, "--length", "2"], "there is no usable conversation among 25 rows"),
        (["--in", *chats, "--validation", "1"], "validation is a share from 0 to below 1"),
    ):
        assert pack(chats, target, tmp_path / "packed", *flags) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl"}
