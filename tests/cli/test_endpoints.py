"""`dspark data regenerate` over a server, from flags to files."""

import json

from starlette.responses import JSONResponse

from dspark_jax.cli.main import main


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_answered_by_the_server_and_a_run_that_stopped_goes_on(
    chat_server, chat_target, tmp_path, monkeypatch, capsys
):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps({"turns": [f"Q{i}?", f"Why {i}?"]}) + "\n" for i in range(30)))
    asked, revoked = [], [True]

    def reply(body, headers):
        asked.append(body["messages"][-1]["content"])
        assert headers["authorization"] == "Bearer secret"
        if revoked[0] and len(asked) > 40:
            return JSONResponse({"error": {"message": "the key is revoked"}}, 401)
        if body["messages"][0]["content"] == "Q7?":
            return JSONResponse({"error": {"message": "no sevens"}}, 400)
        text = f" About {body['messages'][-1]['content']}"
        return JSONResponse({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    monkeypatch.setenv("THE_KEY", "secret")
    command = ["data", "regenerate", "--in", str(source), "--out", str(out), "--target", str(chat_target)]
    command += ["--endpoint", chat_server(reply), "--model", "m", "--concurrency", "4", "--api-key-env", "THE_KEY"]
    assert main(command) == 2
    assert "401 the key is revoked" in capsys.readouterr().err
    done, revoked[0] = rows(out), False
    assert 10 < len(done) < 29
    asked.clear()
    assert main(command) == 0
    assert not {row["messages"][0]["content"] for row in done} & set(asked)
    assert sorted(row["messages"][0]["content"] for row in rows(out)) == sorted(f"Q{i}?" for i in range(30) if i != 7)
    for row in rows(out):
        question, first, why, second = (message["content"] for message in row["messages"])
        assert (first, second) == (f"About {question}", f"About {why}")
    (rejected,) = rows(tmp_path / "train.rejected.jsonl")
    assert "400 no sevens" in rejected["error"]
    assert f"{29 - len(done)} rows answered" in capsys.readouterr().err


def test_mistakes_are_one_sentence(chat_target, tmp_path, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"turns": ["Q?"]}\n')
    alone = ["--endpoint", "http://127.0.0.1:1/v1"]
    command = ["data", "regenerate", "--in", str(source), "--out", str(tmp_path / "o"), "--target", str(chat_target)]
    for flags, said in (
        (alone, "--endpoint needs --model"),
        (["--endpoint", "localhost:8000", "--model", "m"], "an endpoint is an address like"),
        (
            [*alone, "--model", "m", "--api-key-env", "NO_SUCH_KEY"],
            "NO_SUCH_KEY is not set",
        ),
        ([*alone, "--model", "m", "--attempts", "1"], "no endpoint can be reached"),
    ):
        assert main([*command, *flags]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "o.rejected.jsonl").exists() or not (tmp_path / "o.rejected.jsonl").read_text()
