"""The pictures: drawn from records, the same every time, with readable labels."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from jdlb.errors import UserError
from jdlb.records import Record, RoundRecord
from jdlb.report import figures
from jdlb.report.summary import Comparison, summarise

PNG = b"\x89PNG\r\n\x1a\n"
IDEAL = samples.SOLO.ideal_examples_per_second
Runs = dict[str, tuple[Record, ...]]


def many_workers(workers: int, policies: int = 2) -> Runs:
    speeds = tuple(0.25 + 0.1 * w for w in range(workers))
    equal = (15,) * workers
    return {
        f"policy_{p}": samples.make_run(f"policy_{p}", (equal,) * 3, speeds)
        for p in range(policies)
    }


def comparison(runs: Runs) -> Comparison:
    return Comparison(runs, (samples.SOLO,))


def drawn(runs: Runs) -> Iterator[tuple[str, Figure]]:
    c = comparison(runs)
    yield "shares", figures.draw_shares(runs, c.speeds)
    yield "accuracy", figures.draw_accuracy(runs)
    yield "overview", figures.draw_overview(c.summaries, c.speeds, IDEAL)


def text_boxes(
    figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Bbox]]:
    """The texts that reach the canvas: ticks outside the axes exist, but do not."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts: list[Text] = []
    draw = Text.draw

    def remember(self: Text, renderer: RendererBase) -> None:
        texts.append(self)
        draw(self, renderer)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", remember)
        canvas.draw()
    # The box of the letters: that of an annotation covers its line, too.
    boxes = [
        (t.get_text(), Text.get_window_extent(t, canvas.get_renderer()))
        for t in texts
        if t.get_visible() and t.get_text().strip()
    ]
    assert boxes
    return boxes


def test_the_files_of_a_compare_folder(tmp_path: Path) -> None:
    paths = figures.save_figures(comparison(samples.make_runs()), tmp_path / "new")
    assert [p.name for p in paths] == ["accuracy.png", "overview.png", "shares.png"]
    for path in paths:
        assert path.read_bytes().startswith(PNG)
    assert sorted((tmp_path / "new").iterdir()) == list(paths)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    before = json.dumps(dict(matplotlib.rcParams), default=str)
    first = figures.save_figures(comparison(samples.make_runs()), tmp_path / "a")
    # Settings of the person who draws are not the picture's.
    with matplotlib.rc_context(
        {"font.size": 20, "savefig.bbox": "tight", "axes.facecolor": "0"}
    ):
        second = figures.save_figures(comparison(samples.make_runs()), tmp_path / "b")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert json.dumps(dict(matplotlib.rcParams), default=str) == before


@pytest.mark.parametrize(
    "runs",
    [
        samples.make_runs(),
        many_workers(2, policies=1),
        many_workers(8, policies=2),
        many_workers(16, policies=2),
        many_workers(3, policies=7),
    ],
    ids=["sample", "2x1", "8x2", "16x2", "3x7"],
)
def test_no_text_covers_another_or_is_cut(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, figure in drawn(runs):
        boxes = text_boxes(figure, monkeypatch)
        for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
            # A pixel of slack: boxes hold room for letters that go below the line.
            overlap = Bbox.intersection(box_a, box_b)
            assert overlap is None or min(overlap.width, overlap.height) < 2, (
                f"{name}: {a!r} and {b!r}"
            )
        for text, box in boxes:
            inside = figure.bbox
            assert box.x0 >= inside.x0 - 1, f"{name}: {text!r}"
            assert box.x1 <= inside.x1 + 1, f"{name}: {text!r}"
            assert box.y0 >= inside.y0 - 1, f"{name}: {text!r}"
            assert box.y1 <= inside.y1 + 1, f"{name}: {text!r}"


def test_shares_shows_what_was_measured() -> None:
    runs = samples.make_runs()
    axes = figures.draw_shares(runs, samples.SPEEDS).axes
    assert len(axes) == 9
    assert [axis.get_title() for axis in axes[:3]] == ["equal", "static", "dlb"]
    share, busy, wait = (axes[row * 3 + 2].lines[1].get_ydata() for row in range(3))
    assert share == pytest.approx([100 / 3, 100 * 76 / 240, *[100 * 68 / 240] * 4])
    assert busy == pytest.approx(
        [1e3 * samples.busy_seconds(n, 0.5) for n in (80, 76, 68, 68, 68, 68)]
    )
    rounds = [r for r in runs["dlb"] if isinstance(r, RoundRecord)]
    assert wait == pytest.approx([1e3 * r.wait_seconds[1] / 17 for r in rounds])
    assert all("[" in axes[row * 3].get_ylabel() for row in range(3))


def test_rounds_within_an_epoch_have_their_own_place() -> None:
    rounds = [samples.make_round(epoch=e) for e in (0, 0, 1, 2, 2, 2, 2)]
    line = figures.draw_shares({"dlb": rounds}).axes[0].lines[0]
    assert line.get_xdata() == pytest.approx([0, 0.5, 1, 2, 2.25, 2.5, 2.75])


def test_accuracy_is_over_training_seconds() -> None:
    runs = samples.make_runs()
    (axis,) = figures.draw_accuracy(runs).axes
    assert len(axis.lines) == 3
    seconds = sum(r.seconds for r in runs["dlb"] if isinstance(r, RoundRecord))
    assert np.asarray(axis.lines[2].get_xdata())[-1] == pytest.approx(seconds)
    assert np.asarray(axis.lines[2].get_ydata())[-1] == pytest.approx(96.3)
    assert {axis.get_xlabel()[-3:], axis.get_ylabel()[-3:]} == {"[s]", "[%]"}


def test_overview_marks_the_ideal_in_both_halves() -> None:
    c = comparison(samples.make_runs())
    left, right = figures.draw_overview(c.summaries, c.speeds, IDEAL).axes
    assert left.lines[0].get_xdata() == pytest.approx([4320 / IDEAL] * 2)
    assert right.lines[0].get_xdata() == pytest.approx([1e3 * 240 / IDEAL] * 2)
    left, right = figures.draw_overview(c.summaries, c.speeds, None).axes
    assert not left.lines
    assert not right.lines


def test_without_evaluations_there_is_no_accuracy_picture(tmp_path: Path) -> None:
    runs: Runs = {"dlb": (samples.make_round(), samples.make_round(epoch=1))}
    paths = figures.save_figures(comparison(runs), tmp_path)
    assert [p.name for p in paths] == ["overview.png", "shares.png"]


def test_unmeasured_steps_leave_a_gap(tmp_path: Path) -> None:
    record = dataclasses.replace(
        samples.make_round(),
        busy_seconds=(0.0,) * 3,
        wait_seconds=(0.0,) * 3,
        measured_steps=(0,) * 3,
    )
    paths = figures.save_figures(comparison({"dlb": (record,)}), tmp_path)
    assert len(paths) == 2


def test_a_run_without_rounds_leaves_nothing_behind(tmp_path: Path) -> None:
    runs = {**samples.make_runs(), "late": samples.make_run("late", ())}
    with pytest.raises(UserError, match="'late' has no finished round"):
        figures.save_figures(comparison(runs), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_summaries_of_one_worker_are_drawn() -> None:
    run = samples.make_run("equal", ((240,),), (1.0,))
    assert len(figures.draw_overview([summarise(run, None)]).axes) == 2
    assert len(figures.draw_shares({"equal": run}).axes) == 3


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0.01, 3))
def test_labels_keep_their_order_and_distance(wanted: list[float], gap: float) -> None:
    places = figures.spread_out(wanted, gap)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for low, high in itertools.pairwise(order):
        assert places[high] - places[low] >= gap * (1 - 1e-6)
    assert sum(places) == pytest.approx(sum(wanted), abs=1e-6)
