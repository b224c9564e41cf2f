"""Means over a window, and a log that a crash cannot make lie."""

import json

import jax.numpy as jnp
import pytest

from dspark_jax.ops.losses import Mean
from dspark_jax.training.report import Report, Window, read_report, summarise


def mean(total, count) -> Mean:
    return Mean(sum=jnp.asarray(total, jnp.float32), count=jnp.asarray(count, jnp.float32))


def test_sums_add_before_they_are_divided():
    values = summarise([{"ce": mean(3.0, 1.0)}, {"ce": mean(1.0, 3.0)}])
    assert values == {"ce": 1.0}


def test_accepted_length_is_the_bonus_and_the_running_products():
    values = summarise([{"accept_K": mean([0.5, 1.0, 2.0], [1.0, 2.0, 4.0])}])
    assert values["accept_K"] == [0.5, 0.5, 0.5]
    assert values["accepted_length"] == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_a_window_of_skipped_steps_has_no_loss():
    assert summarise([{"loss": mean(0.0, 0.0), "skipped": mean(1.0, 1.0)}]) == {"skipped": 1.0}


def test_lines_and_curves_are_written(tmp_path):
    report = Report(tmp_path, 0)
    report.write(1, "train", {"loss": 2.5, "accept_K": [0.5, 0.25]})
    report.write(1, "evaluation", {"loss": 2.0})
    report.close()
    assert read_report(tmp_path, "train") == [{"step": 1, "kind": "train", "loss": 2.5, "accept_K": [0.5, 0.25]}]
    assert read_report(tmp_path, "evaluation")[0]["loss"] == 2.0
    events = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert all(
        label in events for label in (b"train/loss", b"train/accept_K_1", b"train/accept_K_2", b"evaluation/loss")
    )


def test_reopening_at_a_step_drops_what_came_later_and_what_was_cut(tmp_path):
    report = Report(tmp_path, 0)
    for step in (10, 20, 30):
        report.write(step, "train", {"loss": float(step)})
    report.close()
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 20, "ki')
    Report(tmp_path, 20).close()
    assert [line["step"] for line in read_report(tmp_path, "train")] == [10, 20]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_run_without_a_log_has_no_lines(tmp_path):
    assert read_report(tmp_path, "train") == []


def test_a_window_starts_anew_and_the_compiling_first_step_has_no_pace():
    window = Window()
    window.add({"tokens": mean(8.0, 1.0)})
    assert window.fetch() == {"tokens": 8.0, "tokens_per_second": 0.0}
    window.add({"tokens": mean(6.0, 1.0)})
    with window.paused():
        pass
    window.add({"tokens": mean(2.0, 1.0)})
    values = window.fetch()
    assert values["tokens"] == 4.0
    assert values["tokens_per_second"] > 0.0
