"""The curves of a run as a picture, drawn from its metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_jax.interop.publish import write_picture
from dspark_jax.training.report import read_report

Lines = Sequence[Mapping[str, Any]]

_TERMS = ("loss", "ce", "l1", "confidence")
_LENGTH = "accepted_length_t"


def draw_curves(run_dir: Path) -> Path:
    """Writes curves.png, whole or not at all: loss terms, acceptance by position, accepted length, tokens a second."""
    trained, judged = (read_report(run_dir, kind) for kind in ("train", "evaluation"))
    terms = [name for name in _TERMS if any(name in line for line in trained)]
    figure = Figure(figsize=(3.6 * max(3, len(terms)), 6.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    above, below = parts
    for axes, name in zip(_row(above, len(terms)), terms, strict=True):
        _plot(axes, trained, name, "training", linewidth=0.8)
        _plot(axes, judged, name, "held out", marker="o", markersize=3)
        axes.set_title(name)
    positions, lengths, pace = _row(below, 3)
    slots = max((len(line["accept_K"]) for line in judged if "accept_K" in line), default=0)
    for slot in range(slots):
        kept = [{"step": line["step"], "kept": line["accept_K"][slot]} for line in judged if "accept_K" in line]
        _plot(positions, kept, "kept", str(slot + 1), marker="o", markersize=3)
    positions.set(title="drafts kept, held out, by position", ylim=(0, 1))
    for name in sorted({name for line in judged for name in line if name.startswith(_LENGTH)}):
        _plot(lengths, judged, name, f"T={name.removeprefix(_LENGTH)}", marker="o", markersize=3)
    lengths.set_title("accepted length, held-out prompts")
    _plot(pace, trained, "tokens_per_second", "training", linewidth=0.8)
    pace.set(title="tokens a second", ylim=(0, None))
    for axes in figure.axes:
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    path = run_dir / "curves.png"
    write_picture(figure, path)
    return path


def _row(part: Any, columns: int) -> list[Axes]:
    return list(part.subplots(1, columns, squeeze=False)[0]) if columns else []


def _plot(axes: Axes, lines: Lines, name: str, label: str, **how: Any) -> None:
    points = [(line["step"], line[name]) for line in lines if name in line]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **how)
