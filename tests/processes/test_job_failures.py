"""Real processes that fail: nothing hangs, nobody survives, one line says who."""

import time

import pytest
from jobs import Job, new_job, run_job

from jdlb.cluster.launch.failure import WorkerFailed
from jdlb.errors import RunError, UserError

pytestmark = pytest.mark.slow

# A collective without its peer would wait for half an hour.
SECONDS = 30


@pytest.mark.parametrize("odd", [0, 1], ids=["lead", "another"])
def test_a_killed_worker_is_named_and_ends_the_job(tmp_path, odd):
    job = new_job((1, 1))
    with pytest.raises(WorkerFailed, match=f"^worker {odd} was killed by SIGKILL"):
        run_job(job, tmp_path, ["killed"], odd=odd)
    raised = time.monotonic()
    ((dying, process, _),) = job.of_kind("dying")
    assert process == odd
    assert raised - dying < SECONDS
    assert len(job.pids) == 2
    assert job.alive == []


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory) -> tuple[Job, RunError]:
    """Number 1 of 2 is odd: first every process catches the error, at last nobody."""
    job = new_job((1, 1))
    with pytest.raises(RunError) as caught:
        run_job(
            job, tmp_path_factory.mktemp("odd"), ["disagree", "wrong params"], odd=1
        )
    return job, caught.value


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("params", "the parameters of worker 1 "),
        ("seed", "the seed of worker 1 "),
        ("length", "the number of examples of worker 1 "),
        ("model", "the global program of worker 1 "),
    ],
)
def test_a_disagreement_is_one_line_that_names_the_worker(disagreeing, what, words):
    job, _ = disagreeing
    for of_process in job.results("disagree"):
        assert words in of_process[what]
        assert "\n" not in of_process[what]


def test_a_disagreement_ends_the_job(disagreeing):
    job, error = disagreeing
    assert "the parameters of worker 1 differ from the others at the start" in str(
        error
    )
    assert job.alive == []


def test_a_disagreement_reaches_the_launcher_as_one_line(disagreeing):
    _, error = disagreeing
    assert (
        str(error) == "the parameters of worker 1 differ from the others at the start"
    )


def test_a_users_error_reaches_the_launcher_as_such(tmp_path):
    job = new_job((1, 1))
    text = "^the number of examples of worker 1 is not that of worker 0"
    with pytest.raises(UserError, match=text):
        run_job(job, tmp_path, ["wrong length"], odd=1)
    assert job.alive == []
