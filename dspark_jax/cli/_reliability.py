"""Reports of calibration for people: tables on a terminal and reliability diagrams (the paper's Figure 6)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark_jax.decoding.reliability import Quality, Report
from dspark_jax.interop.publish import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c")


def tables(reports: Mapping[str, Report]) -> list[Table]:
    """ECE, AUC and Brier score of every estimator by position, for c_k and for a_k."""
    return [
        _table("c_k: draft k is kept, given that those before it were", reports, lambda report: report.conditional),
        _table("a_k: drafts up to k are all kept", reports, lambda report: report.cumulative),
    ]


def _table(title: str, reports: Mapping[str, Report], side: Callable[[Report], tuple[Quality, ...]]) -> Table:
    # Narrow enough for 80 columns.
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    columns = ["k", "drafts", "kept", *(f"ECE %\n{name}" for name in reports), "ECE %\nluck"]
    columns += [f"{metric}\n{name}" for metric in ("AUC", "Brier") for name in reports]
    for column in columns:
        table.add_column(column.replace("combined", "comb."), justify="right", no_wrap=True)
    for k, row in enumerate(zip(*map(side, reports.values()), strict=True)):
        first = row[0]
        cells = [str(k), str(first.count), str(int(first.kept_Q.sum()))]
        cells += [_number(quality.ece, 100.0, 2) for quality in row]
        # What exact probabilities would show on so few outcomes, by the luck of the draw: of the last, the best fitted.
        cells += [_number(row[-1].ece_if_true, 100.0, 2)]
        cells += [_number(quality.auc, 1.0, 3) for quality in row] + [_number(quality.brier, 1.0, 3) for quality in row]
        table.add_row(*cells)
    return table


def draw(reports: Mapping[str, Report], path: Path, title: str) -> None:
    """Writes a PNG: a column a position, c_k above and a_k below, observed rate over predicted probability.

    A disc's area follows the number of outcomes in its bin.
    """
    from matplotlib.figure import Figure

    block = len(next(iter(reports.values())).conditional)
    figure = Figure(figsize=(1.8 * block + 0.6, 4.8), layout="constrained")
    grid = figure.subplots(2, block, sharex=True, sharey=True, squeeze=False)
    sides = (
        ("c", [each.conditional for each in reports.values()]),
        ("a", [each.cumulative for each in reports.values()]),
    )
    for row, (letter, qualities) in enumerate(sides):
        for k, estimators in enumerate(zip(*qualities, strict=True)):
            axes = grid[row][k]
            axes.plot([0, 1], [0, 1], color="black", linewidth=0.6)
            for colour, name, quality in zip(_COLOURS, reports, estimators, strict=False):
                _discs(axes, quality, name, colour)
            errors = ", ".join(_number(quality.ece, 100.0, 1) for quality in estimators)
            axes.set_title(f"{letter}{k}: {estimators[0].count:,} drafts\nECE % {errors}", fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    grid[0][0].legend(fontsize=7, loc="upper left")
    figure.supxlabel("predicted", fontsize=8)
    figure.supylabel("observed", fontsize=8)
    figure.suptitle(title, fontsize=9)
    write_picture(figure, path)


def _discs(axes: "Axes", quality: Quality, name: str, colour: str) -> None:
    filled = quality.count_Q > 0
    count = quality.count_Q[filled]
    x, y = quality.predicted_Q[filled] / count, quality.kept_Q[filled] / count
    axes.scatter(x, y, s=3 + 120 * count / max(1, quality.count), color=colour, alpha=0.6, linewidths=0, label=name)


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}".removeprefix("0" if digits == 3 else "")
