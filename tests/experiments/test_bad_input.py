"""Bad input on the command line: one line that says the remedy, and nothing created."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.compare import CompareOptions, check
from experiments.config import load
from jdlb.errors import UserError

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Run:
    """Run a command line in an empty folder: exit status, standard output, error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
        status = main()
        out, err = capsys.readouterr()
        return status, out, err

    return run


def refused(run: Run, *arguments: str) -> str:
    """The one line of a command line that is refused before it makes anything."""
    before = sorted(Path.cwd().rglob("*"))
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert sorted(Path.cwd().rglob("*")) == before
    return err


OUT = ("--out", "made", "--data-dir", "data")


@pytest.mark.parametrize("command", ["compare", "train"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--global-batch 0", ["--global-batch 0", "from 1 to"]),
        ("--epochs 0", ["--epochs 0", "from 1 to"]),
        ("--epochs -3", ["--epochs -3"]),
        ("--run-ahead 0", ["--run-ahead 0"]),
        ("--prefetch 0", ["--prefetch 0"]),
        ("--learning-rate -0.1", ["--learning-rate -0.1", "from 0 to"]),
        ("--learning-rate nan", ["--learning-rate nan", "from 0 to"]),
        ("--momentum inf", ["--momentum inf"]),
        ("--clip-norm 0", ["--clip-norm 0", "from 1e-30"]),
    ],
)
def test_fields_out_of_range(run, command, flags, words):
    err = refused(run, command, "mnist5k", *flags.split(), *OUT)
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # The number of workers is the number of speeds: three.
        ("--global-batch 2", ["global batch of 2", "3 workers", "raise"]),
        ("--caps 50 50 50", ["global batch of 240", "sum of caps, 150", "lower"]),
        ("--caps 240 240", ["2", "3"]),
        ("--caps 0 240 240", ["cap 0"]),
        ("--granule 0", ["--granule 0", "from 1 to"]),
        ("--growth -1", ["--growth -1", "from 0 to 1"]),
        ("--policies", ["--policies is empty", "at least one"]),
        ("--policies dlb equal dlb", ["dlb equal dlb", "twice"]),
        ("--policies equal dbl", ["'dbl'", "did you mean 'dlb'", "dlb, equal, fixed"]),
        ("--policies fixed", ["shares"]),
        ("--policies fixed --shares 0.5 0.3 0.3", ["1.1", "sum"]),
        ("--policies fixed --shares 0.5 0.5", ["2", "3"]),
        ("--policies fixed --shares 1.5 -0.5 0", ["-0.5"]),
        ("--policies fixed --shares nan 0.5 0.5", ["nan"]),
        ("--speeds", ["--speeds is empty", "1 0.5"]),
        ("--speeds 1 0 0.5", ["speed 0.0", "above 0"]),
        ("--speeds 1 -1 0.5", ["speed -1.0", "above 0"]),
        ("--speeds 1 nan 0.5", ["speed nan"]),
        ("--speeds 1 inf 0.5", ["speed inf"]),
        (f"--speeds 1 {CORES + 1} 0.5", [f"speed {CORES + 1}.0", f"{CORES} cores"]),
        ("--dataset mnist5", ["'mnist5'", "did you mean 'mnist5k'", "fashion_mnist"]),
    ],
)
def test_compare_refuses(run, flags, words):
    err = refused(run, "compare", "mnist5k", *flags.split(), *OUT)
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    "changes", [{"dead_band": 2.0}, {"round_steps": 0}, {"seed": -1}], ids=str
)
def test_compare_refuses_before_it_starts_anything(changes):
    with pytest.raises(UserError, match=str(next(iter(changes.values())))):
        check(dataclasses.replace(load("mnist5k"), **changes), CompareOptions())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compar mnist5k", ["command 'compar'", "did you mean 'compare'", "train"]),
        ("nothing", ["command 'nothing'", "compare", "prepare", "train"]),
        ("compare", ["compare needs CONFIG", "mnist5k"]),
        ("compare --epochs 3", ["compare needs CONFIG", "mnist5k"]),
        ("compare mnist5", ["config 'mnist5'", "did you mean 'mnist5k'"]),
        ("train zzz", ["config 'zzz'", "mnist5k"]),
        ("train nowhere.py", ["no config file nowhere.py", "mnist5k"]),
        ("prepare", ["prepare needs DATASET", "mnist5k"]),
        ("prepare mnist --data-dir data", ["data set 'mnist'", "mnist5k"]),
        ("bench", ["bench step"]),
        ("bench stop", ["bench stop", "bench step"]),
    ],
)
def test_what_there_is_not(run, arguments, words):
    err = refused(run, *arguments.split())
    assert all(word in err for word in words)


def test_a_data_set_whose_originals_are_missing(run, tmp_path):
    flags = "--data-dir data --source-dir no"
    status, out, err = run("prepare", "fashion_mnist", *flags.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: no file no/")
    assert err.count("\n") == 1
    # The lock in `data` stays, for whoever prepares it next.
    assert list(tmp_path.glob("data/[!.]*")) == []


def test_the_known_commands_are_those_for_people(run):
    assert "process" not in refused(run, "nothing")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--policy dbl", ["'dbl'", "did you mean 'dlb'", "static"]),
        ("--policy fixed --shares 0.9", ["0.9", "sum"]),
        ("--profile -1", ["--profile -1", "0 or more"]),
    ],
)
def test_train_refuses(run, flags, words):
    err = refused(run, "train", "mnist5k", *flags.split(), *OUT)
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["does not define config()"]),
        ("def config(): return {'epochs': 3}", ["does not define config()"]),
        pytest.param(
            "config = 3",
            ["does not define config()"],
        ),
    ],
)
def test_a_config_file_that_defines_none(run, tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    err = refused(run, "compare", "mine.py", *OUT)
    assert all(word in err for word in ["mine.py", *words])


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_folder_with_another_runs_records(run, tmp_path, command):
    folder = tmp_path / "made" / "dlb"
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("of another run\n")
    err = refused(run, command, "mnist5k", *OUT)
    assert "made" in err
    assert "name a new folder" in err
    assert (folder / "records.jsonl").read_text() == "of another run\n"


def test_a_file_where_the_folder_should_be(run, tmp_path):
    (tmp_path / "made").write_text("a file")
    assert "name a new folder" in refused(run, "compare", "mnist5k", *OUT)
