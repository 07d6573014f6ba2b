"""The command `simulate`: what it prints and writes, and what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import scenarios, simulate
from experiments.__main__ import main
from experiments.against import predict
from jdlb import records
from jdlb.balance import policies
from jdlb.records import RoundRecord, RunHeader, SoloRecord
from jdlb.report.summary import read_comparison

KEYS = {
    "time_over_ideal",
    "utilisation",
    "rounds_to_balance",
    "rebalances",
    "compilations",
    "worst_regression",
}


def command(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["experiments", "simulate", *words])
    return main()


def test_one_scenario_prints_its_object_last(monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "out"
    words = ("steady", "--policies", "equal", "dlb", "--rounds", "5", "--json")
    assert command(monkeypatch, *words, "--out", str(out)) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert list(result) == ["scenario", "workers", "policies"]
    assert (result["scenario"], result["workers"]) == ("steady", 3)
    assert list(result["policies"]) == ["equal", "dlb"]
    assert all(set(score) == KEYS for score in result["policies"].values())
    assert json.loads((out / "league.json").read_text()) == result
    assert (out / "steady.png").is_file()
    assert "steady (simulated)" in printed.err
    assert "(simulated)" not in printed.out


def test_several_scenarios_stand_in_a_list(monkeypatch, capsys, tmp_path) -> None:
    words = ("steady", "hiccup", "--policies", "dlb", "--rounds", "32", "--json")
    assert command(monkeypatch, *words, "--out", str(tmp_path / "out")) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [s["scenario"] for s in result["scenarios"]] == ["steady", "hiccup"]
    regressions = [
        s["policies"]["dlb"]["worst_regression"] for s in result["scenarios"]
    ]
    assert regressions[0] is None
    assert regressions[1] > 0
    assert (tmp_path / "out" / "league.png").is_file()


def test_workers_rounds_and_seed_can_be_given(monkeypatch, capsys, tmp_path) -> None:
    results = []
    for seed in ("1", "2"):
        words = ("steady", "--policies", "dlb", "--workers", "7", "--rounds", "3")
        more = ("--seed", seed, "--out", str(tmp_path / seed), "--json")
        assert command(monkeypatch, *words, *more) == 0
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [r["workers"] for r in results] == [7, 7]
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stedy",), "unknown scenario 'stedy': did you mean 'steady'?"),
        (("steady", "steady"), "one is there twice"),
        (("no/such.py",), "no scenario file no/such.py"),
        (("steady", "--policies", "dbl"), "did you mean 'dlb'?"),
        (("steady", "--policies", "dlb", "dlb"), "one is there twice"),
        (("steady", "--workers", "0"), "--workers 0"),
        (("hiccup", "--workers", "1"), "worker 1 in a cluster of 1"),
        (("steady", "--rounds", "0"), "--rounds 0"),
        (("steady", "--seed", "-1"), "--seed -1"),
        (("steady", "--docs"), "--docs"),
        (("--docs", "--rounds", "3"), "--docs"),
        (("steady", "--against", "/nowhere"), "--against"),
        (("--against", "/nowhere"), "no runs under /nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    monkeypatch, capsys, tmp_path, words, said
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert not printed.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = 1", "does not define scenario()"),
        (
            "def scenario():\n    return Scenario((Worker(TimeTable('t', (), ())),), 8)",
            "0 sizes and 0 times",
        ),
        (
            "def scenario():\n"
            + "    w = Worker(TimeTable.affine(0, 1), cap=3)\n"
            + "    return Scenario((w, w), 8)",
            "above the sum of caps, 6",
        ),
    ],
)
def test_a_bad_file_is_one_line(monkeypatch, capsys, tmp_path, body, said) -> None:
    imports = (
        "from jdlb.balance.simulation.scenario import Scenario, Worker\n"
        "from jdlb.balance.time_tables import TimeTable\n\n"
    )
    path = tmp_path / "mine.py"
    path.write_text(imports + body)
    assert command(monkeypatch, str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("name", scenarios.names())
def test_every_scenario_runs_with_every_policy(name) -> None:
    options = simulate.SimulateOptions(rounds=3)
    named = simulate.changed(scenarios.load(name), options)
    assert named.what.endswith(".")
    if name == "thousand":
        small = simulate.SimulateOptions(rounds=3, workers=30)
        named = simulate.changed(named, small)
    played = simulate.play(named, sorted(policies.POLICIES))
    for policy, score in played.standing.scores.items():
        assert 0 < score.utilisation <= 1, policy
        trace = simulate.trace(played.runs[policy])
        assert trace.step_seconds.shape == trace.ideal_seconds.shape == (3,)


def test_a_worker_that_is_not_there_has_no_share() -> None:
    named = scenarios.load("membership")
    played = simulate.play(named, ["equal"])
    shares = simulate.trace(played.runs["equal"]).shares
    assert np.isnan(shares[30, 0])
    assert not np.isnan(shares[50, 0])
    assert np.isnan(shares[50, 4])
    assert np.nansum(shares, axis=1) == pytest.approx(np.ones(80))


def test_lab_notes_say_how_to_run_them() -> None:
    for name in scenarios.names():
        text = (scenarios.SCENARIO_FOLDER / f"{name}.py").read_text()
        assert f"python -m experiments simulate {name}" in text


def test_docs_are_written_for_all(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate, "DOCS_FOLDER", tmp_path / "docs")
    monkeypatch.setattr(scenarios, "names", lambda: ["gpu_tables", "steady"])
    monkeypatch.setattr(policies, "POLICIES", {"dlb": policies.POLICIES["dlb"]})
    assert command(monkeypatch, "--docs") == 0
    page = (tmp_path / "docs" / "league.md").read_text()
    assert "## gpu_tables" in page
    assert "| policy | gpu_tables | steady |" in page
    assert (tmp_path / "docs" / "league.png").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]
    assert "league.md" in capsys.readouterr().err


# A real run of 3 workers, in records as `compare` leaves them: 20 steps an epoch.
STEPS, NETWORK = 20, 0.02


def busy(size: int, speed: float) -> float:
    return 0.01 + size / (400 * speed)


def round_record(
    policy: str, epoch: int, sizes: tuple[int, ...], slower: float = 1.0
) -> RoundRecord:
    speeds = (1.0, 0.5, 0.25)
    each = [slower * busy(n, s) for n, s in zip(sizes, speeds, strict=True)]
    step = max(each) + NETWORK
    compiled = epoch != 1
    zeros = (0,) * 3
    return RoundRecord(
        policy=policy,
        epoch=epoch,
        round=epoch,
        first_step=0,
        steps=STEPS,
        examples=STEPS * sum(sizes),
        seconds=STEPS * step + 2.0 * compiled,
        sizes=sizes,
        capacities=sizes,
        busy_seconds=tuple(19 * b for b in each),
        busy_median_seconds=tuple(each),
        input_seconds=(0.0,) * 3,
        wait_seconds=tuple(19 * (step - b) for b in each),
        measured_steps=(19,) * 3,
        compilations=(int(compiled),) * 3,
        compile_seconds=(2.0 * compiled,) * 3,
        metrics={},
        skipped_steps=0,
        skipped_by_worker=zeros,
        next_sizes=sizes,
        rebalanced=False,
        reason="",
    )


def write_comparison(folder: Path, slower: float = 1.0, **config) -> None:
    """`slower` is what the counted epochs of `dlb` alone were slower by."""
    fields = {
        "dataset": "mnist5k",
        "epochs": 4,
        "global_batch": 240,
        "learning_rate": 0.1,
        **config,
    }
    shares = {"equal": [(80, 80, 80)] * 4, "dlb": [(80, 80, 80)] + [(136, 70, 34)] * 3}
    for policy, epochs in shares.items():
        path = folder / policy / records.RECORDS_FILE
        path.parent.mkdir(parents=True)
        header = RunHeader(policy, fields, 3, 3, 240, (1.0, 0.5, 0.25), {})
        with path.open("w") as file:
            records.write(file, header)
            for epoch, sizes in enumerate(epochs):
                late = slower if policy == "dlb" and epoch >= 2 else 1.0
                records.write(file, round_record(policy, epoch, sizes, late))
    (folder / "solo").mkdir()
    with (folder / "solo" / records.RECORDS_FILE).open("w") as file:
        solo = SoloRecord((136, 70, 34), (busy(136, 1), busy(70, 0.5), busy(34, 0.25)))
        records.write(file, solo)


def test_a_run_is_predicted_from_the_others(monkeypatch, capsys, tmp_path) -> None:
    write_comparison(tmp_path / "runs")
    assert command(monkeypatch, "--against", str(tmp_path / "runs"), "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    equal = result["policies"]["equal"]
    assert equal["measured_epoch_seconds"] == pytest.approx(
        20 * (busy(80, 0.25) + 0.02)
    )
    assert equal["error"] == pytest.approx(0.0, abs=1e-6)
    dlb = result["policies"]["dlb"]
    assert abs(dlb["error"]) < 0.05
    assert dlb["predicted_sizes"] != [80, 80, 80]


def test_what_is_predicted_is_not_looked_at(tmp_path) -> None:
    """The counted epochs were twice as slow: the prediction must not know."""
    write_comparison(tmp_path / "one")
    write_comparison(tmp_path / "two", slower=2.0)
    one, two = (
        predict("dlb", read_comparison(tmp_path / name)) for name in ("one", "two")
    )
    assert two.measured_seconds > 1.8 * one.measured_seconds
    assert two.predicted_seconds == one.predicted_seconds


def test_rounds_that_are_no_epochs_are_refused(monkeypatch, capsys, tmp_path) -> None:
    write_comparison(tmp_path / "runs", round_steps=5)
    assert command(monkeypatch, "--against", str(tmp_path / "runs")) == 2
    assert "rounds of 5 steps" in capsys.readouterr().err
