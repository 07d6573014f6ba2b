"""The league of simulated runs, for people: table, Markdown and figures.

Every table and figure says that it is simulated. Must not compute scores, nor know
where they come from: it takes anything with the right fields.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, ScalarFormatter
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jdlb.report.figures import MARKERS, PALETTE, PLAIN, styled, worker_color
from jdlb.report.tables import UNKNOWN

POLICIES_IN_A_ROW = 5
# With more workers than this their shares are drawn as a range.
MOST_LINES = 12
# What fits beside each other in the font of the figures.
_LETTERS_AN_INCH = 12
_LEGEND_INCHES = 1.4


class Score(Protocol):
    """What the league knows of one policy in one scenario."""

    @property
    def time_over_ideal(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def rounds_to_balance(self) -> int | None: ...
    @property
    def rebalances(self) -> int: ...
    @property
    def compilations(self) -> int: ...
    @property
    def worst_regression(self) -> float | None: ...


Scores = Mapping[str, Score]


@dataclass(frozen=True)
class Standing:
    """One scenario: what it is, and how every policy did in it.

    Attributes:
      what: one line for people.
      oracle_over_ideal: seconds of the run with the best shares of every round, over
        those of the ideal one: what the noise costs whatever the shares.
      informed: policies that were told what others have to find out; they do not count
        as the best.
    """

    scenario: str
    what: str
    workers: int
    global_batch: int
    rounds: int
    steps: int
    oracle_over_ideal: float
    scores: Scores
    informed: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Trace:
    """One policy over the rounds [R] of one scenario.

    Attributes:
      shares: of the global batch, [R, W]; NaN where a worker was absent.
      step_seconds: mean of a round, [R].
      ideal_seconds: of an ideal step, [R].
    """

    shares: np.ndarray
    step_seconds: np.ndarray
    ideal_seconds: np.ndarray


_COLUMNS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("time /\nideal\n[1]", lambda s: f"{s.time_over_ideal:.3f}"),
    ("utili-\nsation\n[%]", lambda s: f"{100 * s.utilisation:.1f}"),
    (
        "rounds\nto within\n5 %",
        lambda s: UNKNOWN if s.rounds_to_balance is None else f"{s.rounds_to_balance}",
    ),
    ("rebal-\nances", lambda s: f"{s.rebalances}"),
    ("compi-\nlations", lambda s: f"{s.compilations}"),
    (
        "worst\nregression\n[%]",
        lambda s: (
            UNKNOWN if s.worst_regression is None else f"{100 * s.worst_regression:.1f}"
        ),
    ),
)

KEY = """\
- **time / ideal**: seconds of the whole run, with compilation and probes, over those of
  a run whose every step is at the smallest makespan that any whole sizes reach for the
  true times of that round, plus the all-reduce; no noise and no compilation in it.
- **utilisation**: busy time over (workers x step time), compilation left out.
- **rounds to within 5 %**: the first round, from 0, whose makespan is within 5 % of the
  best one, noise left out; a dash if there was none.
- **rebalances**: rounds that ended with other shares. **compilations**: programs, over
  all workers, the first ones too.
- **worst regression**: within 5 rounds of a hiccup, how much longer a step was at most
  than with the shares from before it, noise left out; a dash without a hiccup.
- `fixed` is given the shares that are best while nothing disturbs the workers: what
  somebody would choose who knows them exactly. It does not count as the best below."""


def league_table(standing: Standing) -> Group:
    """One row a policy, the quickest first, readable at 80 columns."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=Text(f"{standing.scenario} (simulated)", style="bold"),
        title_justify="left",
    )
    table.add_column(Text("policy"), no_wrap=True)
    for header, _ in _COLUMNS:
        # `Text`, because rich takes "[1]" in a plain string for a style.
        table.add_column(Text(header), justify="right", no_wrap=True)
    for policy, score in _ranked(standing.scores):
        table.add_row(Text(policy), *(Text(cell(score)) for _, cell in _COLUMNS))
    return Group(table, Text(_caption(standing), style="dim"))


def league_json(standing: Standing) -> dict[str, Any]:
    """The object that `simulate --json` prints for one scenario."""
    return {
        "scenario": standing.scenario,
        "workers": standing.workers,
        "policies": {
            policy: {
                "time_over_ideal": float(s.time_over_ideal),
                "utilisation": float(s.utilisation),
                "rounds_to_balance": s.rounds_to_balance,
                "rebalances": int(s.rebalances),
                "compilations": int(s.compilations),
                "worst_regression": s.worst_regression,
            }
            for policy, s in standing.scores.items()
        },
    }


def league_markdown(standings: Sequence[Standing], command: str, figure: str) -> str:
    """A page with the league over all scenarios, and one table for each.

    Args:
      standings: the scenarios, in order, all with the same policies.
      command: what writes this page.
      figure: the page's figure, relative to it.
    """
    about = (
        "Every policy in every scenario, in simulated seconds: the real controller and "
        "policies, true times from tables, seeded noise and disturbances that are the "
        f"same for all. Written by `{command}`."
    )
    parts = [
        "# The league (simulated)",
        about,
        f"![time over ideal]({figure})",
        KEY,
        "## Time / ideal",
        _overview(standings),
    ]
    for standing in standings:
        head = ["policy", *(header.replace("\n", " ") for header, _ in _COLUMNS)]
        head = [title.replace("- ", "") for title in head]
        rows = [
            [policy, *(cell(score) for _, cell in _COLUMNS)]
            for policy, score in _ranked(standing.scores)
        ]
        parts += [f"## {standing.scenario}", _caption(standing), _markdown(head, rows)]
    return "\n\n".join(parts) + "\n"


@styled
def draw_runs(standing: Standing, traces: Mapping[str, Trace]) -> Figure:
    """Shares and step time over rounds: two panels a policy, side by side."""
    bands = -(-len(traces) // POLICIES_IN_A_ROW)
    columns = -(-len(traces) // bands)
    width = 2.2 * columns + 0.8
    figure = Figure((width, 3.4 * bands + 0.8))
    figure.set_layout_engine("constrained")
    title = f"{standing.scenario} (simulated): {standing.what}"
    figure.suptitle(textwrap.fill(title, int(_LETTERS_AN_INCH * width)), fontsize=10)
    panels = figure.subplots(2 * bands, columns, sharex=True, squeeze=False)
    top = 100 * max(np.nanmax(trace.shares) for trace in traces.values())
    longest = 1e3 * max(t.step_seconds.max() for t in traces.values())
    shortest = 1e3 * min(t.ideal_seconds.min() for t in traces.values())
    for place, (policy, trace) in enumerate(traces.items()):
        band, column = divmod(place, columns)
        upper, lower = panels[2 * band, column], panels[2 * band + 1, column]
        upper.set_title(policy, fontweight="bold")
        _draw_shares(upper, trace)
        _draw_steps(lower, trace)
        upper.set_ylim(0.0, 1.05 * top)
        lower.set_ylim(0.9 * shortest, 1.1 * longest)
        lower.set_xlabel("round")
        lower.tick_params(labelbottom=True)
        if column == 0:
            upper.set_ylabel("share of the\nbatch [%]")
            lower.set_ylabel("step\n[ms]")
        else:
            upper.tick_params(labelleft=False)
            lower.tick_params(labelleft=False)
    for place in range(len(traces), columns * bands):
        band, column = divmod(place, columns)
        panels[2 * band, column].set_visible(False)
        panels[2 * band + 1, column].set_visible(False)
    handles = [*panels[0, 0].get_lines(), *panels[0, 0].collections]
    handles += panels[1, 0].get_lines()
    figure.legend(
        handles=[h for h in handles if not str(h.get_label()).startswith("_")],
        loc="outside lower center",
        ncols=max(1, int(width / _LEGEND_INCHES)),
        frameon=False,
    )
    return figure


@styled
def draw_league(standings: Sequence[Standing]) -> Figure:
    """Time over ideal of every policy in every scenario."""
    policies = list(standings[0].scores)
    figure = Figure((8.0, 0.45 * len(standings) + 1.6))
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    for place, policy in enumerate(policies):
        axis.plot(
            [s.scores[policy].time_over_ideal for s in standings],
            [
                row + 0.5 * ((place + 0.5) / len(policies) - 0.5)
                for row in _rows(standings)
            ],
            linestyle="none",
            color=PALETTE[place % len(PALETTE)],
            marker=MARKERS[place % len(MARKERS)],
            fillstyle="full" if place < len(PALETTE) else "none",
            label=policy,
        )
    axis.set_yticks(_rows(standings), [s.scenario for s in standings])
    axis.set_ylim(len(standings) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    _logarithmic(axis, "x")
    axis.set_xlim(left=0.97)
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1.0)
    axis.set_xlabel("time of the run / ideal, simulated [1]")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _draw_shares(axis: Axes, trace: Trace) -> None:
    rounds, shares = np.arange(len(trace.shares)), 100 * trace.shares
    workers = shares.shape[1]
    if workers <= MOST_LINES:
        for w in range(workers):
            axis.plot(
                rounds,
                shares[:, w],
                color=worker_color(w, workers),
                label=f"worker {w}",
            )
        return
    low, first, median, third, high = np.nanpercentile(
        shares, [0, 25, 50, 75, 100], axis=1
    )
    look = {"color": PALETTE[0], "linewidth": 0}
    axis.fill_between(rounds, low, high, alpha=0.2, label="all workers", **look)
    axis.fill_between(rounds, first, third, alpha=0.4, label="half of them", **look)
    axis.plot(rounds, median, color=PALETTE[0], label="median worker")


def _draw_steps(axis: Axes, trace: Trace) -> None:
    rounds = np.arange(len(trace.step_seconds))
    ideal, step = 1e3 * trace.ideal_seconds, 1e3 * trace.step_seconds
    axis.plot(
        rounds, ideal, color=PLAIN, linestyle="--", linewidth=1.0, label="ideal step"
    )
    axis.plot(rounds, step, color="black", label="step")
    _logarithmic(axis, "y")


def _logarithmic(axis: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers, also where it spans no power of ten."""
    if which == "x":
        axis.set_xscale("log")
        along = axis.xaxis
    else:
        axis.set_yscale("log")
        along = axis.yaxis
    along.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    along.set_major_formatter(ScalarFormatter())
    along.set_minor_locator(NullLocator())
    along.set_minor_formatter(NullFormatter())


def _rows(standings: Sequence[Standing]) -> range:
    return range(len(standings))


def _ranked(scores: Scores) -> list[tuple[str, Score]]:
    return sorted(scores.items(), key=lambda item: item[1].time_over_ideal)


def _caption(standing: Standing) -> str:
    return (
        f"{standing.what}\n"
        f"Simulated: {standing.workers:,} workers, B = {standing.global_batch:,}, "
        f"{standing.rounds} rounds of {standing.steps} steps.\n"
        "With the best shares of every round, noise alone takes "
        f"{standing.oracle_over_ideal:.3f} of the ideal time."
    )


def _overview(standings: Sequence[Standing]) -> str:
    """One row a policy, one column a scenario; the best of each column is bold.

    The best of those that were not told more than others.
    """
    best = {
        standing.scenario: min(
            (
                f"{score.time_over_ideal:.3f}"
                for policy, score in standing.scores.items()
                if policy not in standing.informed
            ),
            key=float,
            default="",
        )
        for standing in standings
    }
    rows = []
    for policy in standings[0].scores:
        cells = []
        for standing in standings:
            shown = f"{standing.scores[policy].time_over_ideal:.3f}"
            is_best = shown == best[standing.scenario]
            uninformed = policy not in standing.informed
            cells.append(f"**{shown}**" if is_best and uninformed else shown)
        rows.append([policy, *cells])
    oracle = [f"{standing.oracle_over_ideal:.3f}" for standing in standings]
    rows.append(["*noise alone*", *oracle])
    return _markdown(["policy", *(s.scenario for s in standings)], rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
