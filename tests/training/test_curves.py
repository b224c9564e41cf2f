"""The picture of a run shows what its log says, at any point of it."""

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_jax.training.curves import draw_curves
from dspark_jax.training.report import Report


@pytest.fixture
def drawn(monkeypatch):
    """What was plotted: label -> points, one list a curve."""
    lines, plot = {}, Axes.plot

    def noted(self, x, y, *, label, **how):
        lines.setdefault(label, []).append(list(zip(x, y, strict=True)))
        return plot(self, x, y, label=label, **how)

    monkeypatch.setattr(Axes, "plot", noted)
    return lines


def test_every_curve_is_drawn_from_the_log(tmp_path, drawn):
    report = Report(tmp_path, 0)
    report.write(0, "evaluation", {"loss": 3.0, "accept_K": [0.1, 0.2], "accepted_length_t0": 1.1})
    report.write(1, "train", {"loss": 2.5, "ce": 2.0, "tokens_per_second": 10.0})
    # A window without a finite step has no loss.
    report.write(2, "train", {"tokens_per_second": 20.0})
    report.write(2, "evaluation", {"loss": 2.0, "accept_K": [0.5, 0.6], "accepted_length_t0": 1.5})
    report.close()
    picture = draw_curves(tmp_path)
    assert picture == tmp_path / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drawn == {
        "training": [[(1, 2.5)], [(1, 2.0)], [(1, 10.0), (2, 20.0)]],
        "held out": [[(0, 3.0), (2, 2.0)]],
        "1": [[(0, 0.1), (2, 0.5)]],
        "2": [[(0, 0.2), (2, 0.6)]],
        "T=0": [[(0, 1.1), (2, 1.5)]],
    }
    assert not list(tmp_path.glob(".curves*"))


def test_a_run_without_steps_has_a_picture_and_a_failed_one_leaves_the_old(tmp_path, monkeypatch):
    before = draw_curves(tmp_path).read_bytes()

    def broken(figure, path, **how):
        path.write_bytes(b"half")
        raise OSError("full")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(OSError, match="full"):
        draw_curves(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    assert (tmp_path / "curves.png").read_bytes() == before
