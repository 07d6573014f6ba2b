"""The league as a terminal, a page and figures show it."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from rich.console import Console

from jdlb.report import league
from jdlb.report.figures import save_figure


@dataclass(frozen=True)
class Sample:
    time_over_ideal: float = 1.25
    utilisation: float = 0.876
    rounds_to_balance: int | None = 3
    rebalances: int = 4
    compilations: int = 12
    worst_regression: float | None = 0.247


NEVER = Sample(2.0, rounds_to_balance=None, worst_regression=None)


def standing(**changes) -> league.Standing:
    given = league.Standing(
        scenario="steady",
        what="Three workers [calm].",
        workers=3,
        global_batch=240,
        rounds=20,
        steps=10,
        oracle_over_ideal=1.047,
        scores={"equal": NEVER, "dlb": Sample()},
    )
    return dataclasses.replace(given, **changes)


def show(given: league.Standing) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(league.league_table(given))
    return capture.get()


def trace(workers: int = 3, rounds: int = 20) -> league.Trace:
    shares = np.full((rounds, workers), 1 / workers)
    shares[: rounds // 2, 0] = np.nan
    steps = np.linspace(0.3, 0.2, rounds)
    return league.Trace(shares, steps, np.full(rounds, 0.19))


def test_the_quickest_comes_first() -> None:
    lines = [line.split() for line in show(standing()).splitlines()]
    rows = [line for line in lines if line[:1] in (["dlb"], ["equal"])]
    assert rows == [
        ["dlb", "1.250", "87.6", "3", "4", "12", "24.7"],
        ["equal", "2.000", "87.6", "-", "4", "12", "-"],
    ]


def test_it_says_that_it_is_simulated_and_of_what() -> None:
    text = " ".join(show(standing(workers=1000)).split())
    assert "steady (simulated)" in text
    assert "Three workers [calm]." in text
    assert "Simulated: 1,000 workers, B = 240, 20 rounds of 10 steps." in text
    assert "takes 1.047 of the ideal time" in text


def test_it_fits_80_columns_uncut() -> None:
    text = show(
        standing(scores={"self_adaptive": Sample(123.4567, compilations=99999)})
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_the_object_has_the_documented_keys() -> None:
    assert league.league_json(standing()) == {
        "scenario": "steady",
        "workers": 3,
        "policies": {
            "equal": {
                "time_over_ideal": 2.0,
                "utilisation": 0.876,
                "rounds_to_balance": None,
                "rebalances": 4,
                "compilations": 12,
                "worst_regression": None,
            },
            "dlb": {
                "time_over_ideal": 1.25,
                "utilisation": 0.876,
                "rounds_to_balance": 3,
                "rebalances": 4,
                "compilations": 12,
                "worst_regression": 0.247,
            },
        },
    }


def test_the_page_has_an_overview_and_a_table_for_each_scenario() -> None:
    other = standing(scenario="wave", scores={"equal": Sample(1.1), "dlb": Sample(1.2)})
    page = league.league_markdown([standing(), other], "the command", "league.png")
    assert page.startswith("# The league (simulated)\n")
    assert "`the command`" in page
    assert "(league.png)" in page
    # The best of each column is bold.
    assert "| policy | steady | wave |\n| --- | ---: | ---: |" in page
    assert "| equal | 2.000 | **1.100** |" in page
    assert "| dlb | **1.250** | 1.200 |" in page
    assert "| *noise alone* | 1.047 | 1.047 |" in page
    assert "\n## steady\n" in page
    assert "| policy | time / ideal [1] | utilisation [%] |" in page
    assert "| dlb | 1.250 | 87.6 | 3 | 4 | 12 | 24.7 |" in page


def test_who_was_told_more_is_not_the_best() -> None:
    scores = {"fixed": Sample(1.0), "dlb": Sample(1.2)}
    given = standing(scores=scores, informed=("fixed",))
    page = league.league_markdown([given], "the command", "league.png")
    assert "| fixed | 1.000 |" in page
    assert "| dlb | **1.200** |" in page


def test_figures_say_that_they_are_simulated() -> None:
    drawn = league.draw_runs(standing(), {"dlb": trace()})
    assert "steady (simulated)" in drawn.get_suptitle()
    drawn = league.draw_league([standing(), standing(scenario="wave")])
    assert "simulated" in drawn.axes[0].get_xlabel()
    labels = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert labels == ["steady", "wave"]


@pytest.mark.parametrize("workers", [3, 40])
def test_panels_of_all_policies(workers, tmp_path) -> None:
    traces = {f"policy{i}": trace(workers) for i in range(7)}
    drawn = league.draw_runs(standing(), traces)
    shown = [axis for axis in drawn.axes if axis.get_visible()]
    assert len(shown) == 14
    titles = [axis.get_title() for axis in drawn.axes[:4]]
    assert titles == [f"policy{i}" for i in range(4)]
    lower = drawn.axes[4]
    ideal, step = lower.get_lines()
    assert ideal.get_ydata() == pytest.approx(190.0)
    assert np.asarray(step.get_ydata())[0] == pytest.approx(300.0)
    low, high = lower.get_ylim()
    assert low < 190
    assert high > 300
    save_figure(drawn, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def test_a_worker_that_is_absent_has_no_share() -> None:
    drawn = league.draw_runs(standing(), {"dlb": trace()})
    first, second = drawn.axes[0].get_lines()[:2]
    assert np.isnan(np.asarray(first.get_ydata())[0])
    assert np.asarray(second.get_ydata())[0] == pytest.approx(100 / 3)
