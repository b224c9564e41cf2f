"""A step curve for people: a table of milliseconds, what the scheduler would make of it, and a plot."""

from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark_jax.decoding.buckets import verify_sizes
from dspark_jax.decoding.outlook import Outlooks
from dspark_jax.decoding.planner import Planner
from dspark_jax.decoding.profile_file import Profile
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import TwoStep
from dspark_jax.interop.publish import write_picture

_CONFIDENCES = (0.5, 0.7, 0.9)


def tables(profile: Profile) -> list[Table]:
    """One a span: milliseconds of a round by requests and tokens verified for each, then the tokens that two-step
    verification would choose for each if the target kept every draft with probability c."""
    spans = sorted({shape.span for shape in profile.curve.measured})
    return [_table(profile, span) for span in spans]


def _table(profile: Profile, span: int) -> Table:
    curve, block = profile.curve, profile.fingerprint.block
    widths = verify_sizes(1, block)
    title = f"ms a round, {span} positions, by tokens verified a request; tokens chosen at confidence c"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("requests", *map(str, widths), *(f"c={c:g}" for c in _CONFIDENCES)):
        table.add_column(column, justify="right", no_wrap=True)
    for rows in sorted({shape.rows for shape in curve.measured if shape.span == span}):
        measured = _quickest(profile, rows, span)
        times = [f"{1000 * measured[rows * width]:.3g}" if rows * width in measured else "" for width in widths]
        table.add_row(str(rows), *times, *(f"{chosen(profile, rows, span, c) / rows:g}" for c in _CONFIDENCES))
    return table


def chosen(profile: Profile, rows: int, span: int, confidence: float) -> int:
    """Tokens of the round that two-step verification plans for so many requests of equal confidence."""
    block, rule = profile.fingerprint.block, Rule(profile.fingerprint.rule)
    planner = Planner(TwoStep(), block=block, curve=profile.curve, rule=rule)
    outlooks = Outlooks.empty(rows, block)
    outlooks.live_B[:] = outlooks.known_B[:] = True
    outlooks.survival_BK[:] = confidence ** np.arange(1, block + 1)
    plan = planner.plan(span, outlooks)
    return plan.sizes[-1] if plan.sizes else rows * ((plan.drafts or 0) + 1)


def _quickest(profile: Profile, rows: int, span: int) -> dict[int, float]:
    """Seconds of the quickest round by tokens verified, rising."""
    times: dict[int, float] = {}
    for shape, seconds in sorted(profile.curve.measured.items()):
        if (shape.rows, shape.span) == (rows, span):
            times[shape.tokens] = min(seconds, times.get(shape.tokens, seconds))
    return times


def draw(profile: Profile, path: Path) -> None:
    """Writes a PNG: rounds a second over tokens verified, a line for every (rows, span)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    measured = profile.curve.measured
    for rows, span in sorted({(shape.rows, shape.span) for shape in measured}):
        points = _quickest(profile, rows, span)
        axes.plot(list(points), [1 / seconds for seconds in points.values()], marker=".", label=f"{rows} x {span}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens verified a round")
    axes.set_ylabel("rounds a second")
    axes.set_title(f"{profile.fingerprint.device}{' (predicted)' if profile.predicted else ''}", fontsize=9)
    axes.legend(title="requests x positions", fontsize=7, title_fontsize=7)
    axes.grid(alpha=0.3)
    write_picture(figure, path)
