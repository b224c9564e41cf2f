"""The numbers of a run, on disk: metrics.jsonl and TensorBoard."""

import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from dspark_jax.training.step import Metrics

Values = dict[str, Any]
"""Numbers by name; a list of them where there is one for each slot."""


class Report:
    """Appends one line of values per call; lines after `step`, written by a process that died later, go."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _keep_until(self._path, step)
        self._lines = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """kind is "train" or "evaluation"; per-slot lists become one TensorBoard curve a slot."""
        self._lines.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            slots = value if isinstance(value, list) else [value]
            for slot, number in enumerate(slots):
                label = f"{kind}/{name}_{slot + 1}" if isinstance(value, list) else f"{kind}/{name}"
                self._board.add_scalar(label, number, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


class NoReport:
    """Of the processes that do not write."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Window:
    """The metrics of the steps since the last fetch, and the pace of those steps."""

    def __init__(self):
        self._metrics: list[Metrics] = []
        self._since = 0.0
        self._timed: int | None = None

    def add(self, metrics: Metrics) -> None:
        """Does not wait for the device, but after the first step ever: it compiles, and must not spoil the pace."""
        self._metrics.append(metrics)
        if self._timed is None:
            jax.block_until_ready(metrics)
            self._since, self._timed = time.monotonic(), 0
        else:
            self._timed += 1

    @contextmanager
    def paused(self) -> Generator[None]:
        """What happens inside is not training time."""
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began

    def fetch(self) -> Values:
        """The means of the window and tokens_per_second (0 when only the first step was in it); starts a new one."""
        values = summarise(self._metrics)
        now = time.monotonic()
        values["tokens_per_second"] = values["tokens"] * self._timed / (now - self._since) if self._timed else 0.0
        self._metrics, self._since, self._timed = [], now, 0
        return values


def read_report(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, oldest first."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] == kind]


def summarise(window: Sequence[Metrics]) -> Values:
    """Sums over counts of a window of steps, fetched from the device in one go.

    A quantity nothing was counted for is left out. `accepted_length` is what independent slots would give: one
    bonus token and the running products of the mean acceptance of each slot.
    """
    fetched = jax.device_get([{name: (mean.sum, mean.count) for name, mean in metrics.items()} for metrics in window])
    values: Values = {}
    for name in fetched[0]:
        total, count = (np.sum([metrics[name][i] for metrics in fetched], axis=0, dtype=np.float64) for i in (0, 1))
        if np.all(count > 0):
            values[name] = (total / count).tolist()
    if "accept_K" in values:
        values["accepted_length"] = float(1.0 + np.sum(np.cumprod(values["accept_K"])))
    return values


def _keep_until(path: Path, step: int) -> None:
    """Drop later lines, and a last line that was cut by a crash. The file is replaced whole."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] > step:
                continue
        except ValueError:
            continue
        kept.append(line + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
