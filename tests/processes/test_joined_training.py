"""Real processes joined over gloo: the same model as on one device, honest times.

A job of processes costs seconds to start, so one job runs several scenarios (see
`job_program.py`), and the tests below look at what came of them.
"""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tiny_model
from job_program import DELAY_SECONDS, EVALUATED, NAN_STEP
from jobs import Job, new_job, run_job
from tiny_model import EXAMPLES, GLOBAL_BATCH

pytestmark = pytest.mark.slow

TOPOLOGIES = {
    "2 processes": (1, 1),
    "3 processes": (1, 1, 1),
    "2 processes of 2": (2, 2),
    "3 processes of 2, 1, 1": (2, 1, 1),
}
LATE = {"2 processes": 1, "3 processes": 0}
EPOCHS = {"dlb": 3, "shifted": 2}
# Each step's gradient is the same sum in another order: some 1e-7 of its norm. Momentum
# carries that through a dozen steps. A mean of means would be off by 1e-2.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=TOPOLOGIES)
def job(request, tmp_path_factory) -> Job:
    """Training and evaluation, and in some jobs a process that leaves 3 s late."""
    devices = TOPOLOGIES[request.param]
    job = new_job(devices, late=LATE.get(request.param))
    run_job(job, tmp_path_factory.mktemp("job"), ["dlb", "shifted"])
    return job


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory) -> Job:
    """Three processes, of which number 1 is slow, or has NaN in its data."""
    job = new_job((1, 1, 1))
    scenarios = ["delayed", "unlike", "nan once", "nan always"]
    run_job(job, tmp_path_factory.mktemp("disturbed"), scenarios, odd=1)
    return job


train_alone = functools.cache(tiny_model.train_alone)


def relative(difference: np.ndarray, whole: np.ndarray) -> float:
    return float(np.linalg.norm(difference) / np.linalg.norm(whole))


@pytest.mark.parametrize("scenario", EPOCHS)
def test_parameters_are_those_of_one_device(job, scenario):
    alone = tiny_model.flatten(train_alone(EPOCHS[scenario]))
    first = tiny_model.flatten(tiny_model.make_params())
    assert relative(alone - first, first) > 0.1
    for replica in job.replicas(scenario):
        assert relative(replica - alone, alone) < TOLERANCE


@pytest.mark.parametrize("scenario", EPOCHS)
def test_replicas_are_equal_to_the_bit(job, scenario):
    replicas = job.replicas(scenario)
    assert len(replicas) == job.workers
    assert (replicas == replicas[0]).all()


@pytest.mark.parametrize("scenario", EPOCHS)
def test_each_example_is_read_once_an_epoch(job, scenario):
    reads = np.array([result["reads"] for result in job.results(scenario)])
    assert reads.shape == (len(job.devices), EPOCHS[scenario], EXAMPLES)
    assert (reads.sum(axis=0) == 1).all()
    # By the process that needs it: nobody reads it all.
    assert (reads.sum(axis=2) < EXAMPLES).all()


@pytest.mark.parametrize("scenario", EPOCHS)
def test_each_example_takes_part_once_an_epoch(job, scenario):
    """Sums of indices and of their squares, from what the loss function saw."""
    sums = collections.defaultdict(lambda: np.zeros(3))
    for record in job.rounds(scenario):
        means = [1, record.metrics["index"], record.metrics["square"]]
        sums[record.epoch] += record.examples * np.array(means)
    index = np.arange(EXAMPLES)
    expected = np.array([EXAMPLES, index.sum(), (index**2).sum()])
    assert len(sums) == EPOCHS[scenario]
    for found in sums.values():
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("scenario", EPOCHS)
def test_all_processes_have_the_same_records(job, scenario):
    """But for who decided, and for everybody's own clock around the round."""
    of_lead, *others = [
        [
            dataclasses.replace(record, reason="", seconds=0)
            for record in job.rounds(scenario, process)
        ]
        for process in range(len(job.devices))
    ]
    assert of_lead
    assert all(records == of_lead for records in others)
    assert all(sum(record.sizes) == GLOBAL_BATCH for record in of_lead)


def test_shares_changed_with_every_round(job):
    rounds = job.rounds("shifted")
    # Two full rounds and a partial batch, twice.
    assert [record.steps for record in rounds] == [2, 2, 1, 2, 2, 1]
    assert all(record.rebalanced for record in rounds)
    sizes = [record.sizes for record in rounds]
    assert all(a != b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("scenario", EPOCHS)
def test_evaluation_counts_are_exact(job, scenario):
    params = train_alone(EPOCHS[scenario])
    for result in job.results(scenario):
        for count, found in zip(EVALUATED, result["evaluations"], strict=True):
            examples, means = found
            assert examples == count
            losses, metrics = tiny_model.loss(params, tiny_model.make_batch(count))
            assert means["accuracy"] * count == int(metrics["accuracy"].sum())
            assert means["index"] * count == sum(range(count))
            assert means["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


@pytest.mark.parametrize("job", LATE, indirect=True)
def test_one_that_leaves_late_is_waited_for(job):
    """And all exit 0, or `run_job` would have raised."""
    finished = {process: at for at, process, _ in job.of_kind("finished")}
    left = {process: at for at, process, _ in job.of_kind("left")}
    others = [p for p in range(len(job.devices)) if p != job.late]
    assert min(finished[job.late] - finished[p] for p in others) > 2
    assert len(left) == len(job.devices)
    assert min(left.values()) >= finished[job.late]


def test_nobody_is_left(job):
    assert len(job.pids) == len(job.devices)
    assert job.alive == []


def test_a_delay_is_busy_time_of_its_worker_alone(disturbed):
    (record,) = disturbed.rounds("delayed")
    # Of four full steps, the first is of a new shape.
    assert record.measured_steps == (3, 3, 3)
    busy = record.busy_median_seconds
    # A little of it can pass while the step before is still under way.
    assert busy[1] > DELAY_SECONDS / 2
    assert max(busy[0], busy[2]) < DELAY_SECONDS / 2
    wait = np.array(record.wait_seconds) / record.measured_steps
    assert wait[1] < DELAY_SECONDS / 2
    assert min(wait[0], wait[2]) > DELAY_SECONDS / 2


def test_whole_steps_could_not_tell_who_was_slow(disturbed):
    """The mutant: a timer around the whole step, which is busy and waiting time."""
    (record,) = disturbed.rounds("delayed")
    whole = np.add(record.busy_seconds, record.wait_seconds) / record.measured_steps
    assert whole.min() > DELAY_SECONDS / 2
    assert np.ptp(whole) < DELAY_SECONDS / 4
    assert np.ptp(record.busy_median_seconds) > DELAY_SECONDS / 2


def test_a_worker_100_times_slower_is_not_starved(disturbed):
    rounds = disturbed.rounds("unlike")
    slow = [record.sizes[1] for record in rounds] + [rounds[-1].next_sizes[1]]
    assert slow[0] == GLOBAL_BATCH // 3
    # Its fair share, 0.12 examples, is none; it keeps the floor.
    assert slow[1:] == [1, 1, 1, 1]
    assert all(min(record.sizes) >= 1 for record in rounds)
    assert all(sum(record.sizes) == GLOBAL_BATCH for record in rounds)
    assert all(min(record.measured_steps) > 0 for record in rounds)
    assert all(record.examples == EXAMPLES for record in rounds)


def test_a_step_with_nan_is_skipped_everywhere_and_its_worker_named(disturbed):
    epoch, step = NAN_STEP
    rounds = disturbed.rounds("nan once")
    assert [record.skipped_steps for record in rounds] == [1, 0, 0]
    assert rounds[epoch].skipped_by_worker == (0, 1, 0)
    assert rounds[epoch].examples == EXAMPLES - GLOBAL_BATCH
    assert all(np.isfinite(record.metrics["loss"]) for record in rounds)
    replicas = disturbed.replicas("nan once")
    assert (replicas == replicas[0]).all()
    alone = tiny_model.flatten(tiny_model.train_alone(3, skipped=[(epoch, step)]))
    assert relative(replicas[0] - alone, alone) < TOLERANCE


def test_ten_nan_steps_end_the_run_and_name_the_worker(disturbed):
    errors = {result["error"] for result in disturbed.results("nan always")}
    (error,) = errors
    assert error.startswith("10 updates in a row were skipped: gradients of worker 1 ")
    assert "\n" not in error
