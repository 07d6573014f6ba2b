"""Pictures of a comparison: PNG files, the same bytes for the same records.

Drawn on `Figure` objects with the Agg canvas; no pyplot, whose figures are global
state. Must not compute rates of its own: they come from `summary`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps, colors, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jdlb.records import EvaluationRecord, Record, RoundRecord
from jdlb.report.summary import Comparison, PolicySummary, of_kind, step_seconds

Runs = Mapping[str, Sequence[Record]]

# Okabe and Ito's palette, told apart with any kind of colour vision; without yellow,
# which is lost on white. "Color Universal Design", 2008.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BUSY, WAITING, PLAIN = "#0072B2", "#E69F00", "#8C8C8C"
MARKERS = "osD^vPX"
DOTS_PER_INCH = 150
# More workers than this get no label each: there is no room.
MOST_LABELLED = 12

_STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
}
# Room that a label takes: its height, and the width of a bold letter.
_LABEL_POINTS = 11.0
_CHARACTER_POINTS = 6.5
styled = style.context(["default", _STYLE])


def save_figures(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Draw `shares.png`, `accuracy.png` and `overview.png` into `folder`.

    `accuracy.png` is left out when no run has a test accuracy. Returns the paths.

    Raises:
      UserError: a run has no finished round; nothing is written then.
    """
    summaries = comparison.summaries
    figures = {
        "shares.png": draw_shares(comparison.runs, comparison.speeds),
        "overview.png": draw_overview(
            summaries, comparison.speeds, comparison.ideal_examples_per_second
        ),
    }
    if any(s.test_accuracy is not None for s in summaries):
        figures["accuracy.png"] = draw_accuracy(comparison.runs)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in sorted(figures.items()):
        save_figure(figure, folder / name)
        paths.append(folder / name)
    return tuple(paths)


@styled
def draw_shares(runs: Runs, speeds: Sequence[float] = ()) -> Figure:
    """Share, busy and wait time of every worker over epochs: one column a policy."""
    rows: tuple[tuple[str, Callable[[RoundRecord, int], float]], ...] = (
        ("share of the\nbatch [%]", lambda r, w: 100 * r.sizes[w] / sum(r.sizes)),
        ("busy\n[ms a step]", lambda r, w: _milliseconds(r.busy_seconds, r, w)),
        ("waiting\n[ms a step]", lambda r, w: _milliseconds(r.wait_seconds, r, w)),
    )
    height = 1.7
    figure = Figure((2.2 * len(runs) + 2.2, height * len(rows) + 0.6))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(
        len(rows), len(runs), sharex=True, sharey="row", squeeze=False
    )
    for row, (label, value) in enumerate(rows):
        axes[row, 0].set_ylabel(label)
        ends: list[tuple[float, str, str]] = []
        for column, (policy, run) in enumerate(runs.items()):
            rounds = of_kind(run, RoundRecord)
            axis = axes[row, column]
            if row == 0:
                axis.set_title(policy, fontweight="bold")
            ends = []
            for worker in range(len(rounds[0].sizes)):
                y = [value(r, worker) for r in rounds]
                color = worker_color(worker, len(rounds[0].sizes))
                marker = MARKERS[worker % len(MARKERS)]
                axis.plot(_epochs(rounds), y, color=color, marker=marker, clip_on=False)
                ends.append((_last_known(y), _worker_label(worker, speeds), color))
        axes[row, 0].set_ylim(bottom=0.0)
        label_ends(axes[row, -1], ends, axes_points=0.8 * 72 * height)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


@styled
def draw_accuracy(runs: Runs) -> Figure:
    """Test accuracy over training seconds: what balancing is for."""
    width = 6.4
    figure = Figure((width, 3.8))
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    ends: list[tuple[float, float, str, str]] = []
    for index, (policy, run) in enumerate(runs.items()):
        points = [
            (e.training_seconds, 100 * e.metrics["accuracy"])
            for e in of_kind(run, EvaluationRecord)
            if "accuracy" in e.metrics
        ]
        if not points:
            continue
        color = PALETTE[index % len(PALETTE)]
        marker = MARKERS[index % len(MARKERS)]
        axis.plot(*zip(*points, strict=True), color=color, marker=marker)
        seconds, accuracy = points[-1]
        ends.append((seconds, accuracy, f"{policy}\n{seconds:.0f} s", color))
    axis.set_xlim(left=0.0)
    axis.set_xlabel("training time, evaluation not included [s]")
    axis.set_ylabel("test accuracy [%]")
    _label_above(axis, ends, axes_points=0.85 * 72 * width)
    return figure


@styled
def draw_overview(
    summaries: Sequence[PolicySummary],
    speeds: Sequence[float] = (),
    ideal: float | None = None,
) -> Figure:
    """Seconds an epoch, and each worker's busy and waiting time a step, by policy.

    `ideal`, in examples/s, is marked in both halves.
    """
    workers = max(len(s.sizes) for s in summaries)
    height = len(summaries) * min(max(0.9, 0.25 * workers), 2.5) + 1.0
    figure = Figure((9.0, height))
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, sharey=False)
    _draw_epochs(left, summaries)
    _draw_steps(right, summaries, speeds)
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
        axis.set_ylim(len(summaries) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
    if ideal is not None:
        first = summaries[0]
        epoch_examples = first.epoch_seconds * first.examples_per_second
        _mark_ideal(left, epoch_examples / ideal)
        _mark_ideal(right, 1e3 * sum(first.sizes) / ideal)
    return figure


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, near the wanted ones and in their order.

    Neighbours that are too close form a block about the mean of what they want.

    >>> spread_out([1.0, 5.0, 1.0], gap=2.0)
    [0.0, 5.0, 2.0]
    """
    blocks: list[list[int]] = []
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        blocks.append([index])
        while len(blocks) > 1 and (
            _block(wanted, blocks[-1], gap)[0] - _block(wanted, blocks[-2], gap)[-1]
            < gap
        ):
            last = blocks.pop()
            blocks[-1] += last
    positions = [0.0] * len(wanted)
    for block in blocks:
        for index, position in zip(block, _block(wanted, block, gap), strict=True):
            positions[index] = position
    return positions


def _block(wanted: Sequence[float], block: Sequence[int], gap: float) -> list[float]:
    start = sum(wanted[i] for i in block) / len(block) - gap * (len(block) - 1) / 2
    return [start + gap * rank for rank in range(len(block))]


def _draw_epochs(axis: Axes, summaries: Sequence[PolicySummary]) -> None:
    positions = range(len(summaries))
    bars = axis.barh(
        positions, [s.epoch_seconds for s in summaries], height=0.6, color=PLAIN
    )
    axis.bar_label(
        bars,
        [
            f"{s.epoch_seconds:.1f} s\n{s.examples_per_second:,.0f} examples/s"
            for s in summaries
        ],
        padding=4,
    )
    axis.set_yticks(positions, [s.policy for s in summaries], fontweight="bold")
    axis.set_xlim(0.0, 1.5 * max(s.epoch_seconds for s in summaries))
    axis.set_xlabel("time of an epoch, median [s]")


def _draw_steps(
    axis: Axes, summaries: Sequence[PolicySummary], speeds: Sequence[float]
) -> None:
    ticks: list[tuple[float, str]] = []
    for row, summary in enumerate(summaries):
        pitch = 0.84 / len(summary.sizes)
        busy = [1e3 * (b or 0.0) for b in summary.busy_step_seconds]
        wait = [1e3 * (w or 0.0) for w in summary.wait_step_seconds]
        y = [row - 0.42 + pitch * (w + 0.5) for w in range(len(summary.sizes))]
        axis.barh(y, busy, height=0.8 * pitch, color=BUSY)
        axis.barh(y, wait, left=busy, height=0.8 * pitch, color=WAITING)
        if len(y) <= MOST_LABELLED:
            ticks += [(p, _worker_label(w, speeds)) for w, p in enumerate(y)]
    axis.set_yticks([p for p, _ in ticks], [label for _, label in ticks], fontsize=8)
    axis.set_xlabel("time of a step, mean [ms]")
    # Above the word "ideal", wherever that stands.
    above = {"fontsize": 9, "fontweight": "bold", "pad": 18}
    axis.set_title("busy", loc="left", color=BUSY, **above)
    axis.set_title("waiting", loc="right", color=WAITING, **above)


def _mark_ideal(axis: Axes, position: float) -> None:
    axis.axvline(position, color="black", linestyle="--", linewidth=1.0)
    axis.annotate(
        "ideal",
        (position, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
    )


def label_ends(
    axis: Axes, ends: Sequence[tuple[float, str, str]], axes_points: float
) -> None:
    """Name the lines right of the axes at their last values, without overlap."""
    if len(ends) > MOST_LABELLED:
        ends = (ends[0], ends[-1])
    low, high = axis.get_ylim()
    heights = [
        (y - low) / (high - low) if math.isfinite(y) else 0.0 for y, _, _ in ends
    ]
    places = spread_out(heights, _LABEL_POINTS / axes_points)
    for (_, label, color), place in zip(ends, places, strict=True):
        axis.annotate(
            label,
            (1.0, place),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            va="center",
        )


def _label_above(
    axis: Axes, ends: Sequence[tuple[float, float, str, str]], axes_points: float
) -> None:
    """Name the lines above the axes, over their last points, without overlap."""
    right = axis.get_xlim()[1]
    longest = max(len(line) for _, _, text, _ in ends for line in text.splitlines())
    gap = (longest + 1) * _CHARACTER_POINTS / axes_points
    places = spread_out([x / right for x, _, _, _ in ends], gap)
    for (x, y, text, color), place in zip(ends, places, strict=True):
        axis.annotate(
            text,
            (x, y),
            xytext=(place, 1.04),
            textcoords="axes fraction",
            color=color,
            ha="center",
            va="bottom",
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": color, "linestyle": ":"},
        )


@styled
def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG file, the same bytes for the same figure."""
    # Without the program's version: the same picture is the same file.
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def _epochs(rounds: Iterable[RoundRecord]) -> list[float]:
    """Where each round begins, in epochs: its place among the rounds of its epoch."""
    rounds = list(rounds)
    count: dict[int, int] = {}
    for record in rounds:
        count[record.epoch] = count.get(record.epoch, 0) + 1
    seen: dict[int, int] = {}
    places = []
    for record in rounds:
        before = seen.get(record.epoch, 0)
        places.append(record.epoch + before / count[record.epoch])
        seen[record.epoch] = before + 1
    return places


def _milliseconds(totals: Sequence[float], record: RoundRecord, worker: int) -> float:
    seconds = step_seconds(totals[worker], record.measured_steps[worker])
    return math.nan if seconds is None else 1e3 * seconds


def _last_known(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return known[-1] if known else math.nan


def _worker_label(worker: int, speeds: Sequence[float]) -> str:
    if worker >= len(speeds):
        return f"worker {worker}"
    unit = "core" if speeds[worker] <= 1 else "cores"
    return f"worker {worker}, {speeds[worker]:g} {unit}"


def worker_color(worker: int, workers: int) -> str:
    """One of the palette, or of a scale where the palette is too short."""
    if workers <= len(PALETTE):
        return PALETTE[worker]
    return colors.to_hex(colormaps["viridis"](0.85 * worker / (workers - 1)))
