"""Which of several failures is named, from exit statuses and logs."""

import pytest

from jdlb.cluster.launch.failure import Ending, WorkerFailed, job_error, tail


def ending(tmp_path, worker, status, when, text) -> Ending:
    path = tmp_path / f"{worker}.log"
    path.write_text(text)
    return Ending(worker, status, when, path)


SUFFERED = "XlaRuntimeError: Gloo all-reduce failed: Connection closed by peer\n"
ABORTED = "F0000 00:00:17.5 1 x.cc:1] Terminating: the coordination service ...\n"
GREETING = "[Gloo] Rank 0 is connected to 2 peer ranks. Expected: 2\n"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([(1, SUFFERED), (1, "ValueError: mine\n")], 1),
        ([(1, SUFFERED), (-9, GREETING)], 1),
        ([(-6, ABORTED), (1, GREETING + "ValueError: mine\n")], 1),
        ([(1, SUFFERED), (-6, ABORTED)], 0),
        ([(1, "ValueError: mine\n"), (-9, "")], 0),
        # What a killed process last wrote is not why it died.
        ([(1, SUFFERED), (-9, SUFFERED)], 1),
    ],
)
def test_which_failure_is_the_cause(tmp_path, failures, cause):
    endings = [
        ending(tmp_path, worker, status, float(worker), text)
        for worker, (status, text) in enumerate(failures)
    ]
    error = job_error(endings)
    assert isinstance(error, WorkerFailed)
    assert error.ending.worker == cause
    assert isinstance(job_error(endings[::-1]), WorkerFailed)
    assert job_error(endings[::-1]).args == error.args


def test_the_tail_is_short_and_without_chatter(tmp_path):
    chatter = "W0000 00:00:17.5 1 chatter.cc:1] nothing\n\n" + GREETING
    lines = [f"line {n} " + 1000 * "x" for n in range(5000)]
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n" + chatter)
    assert tail(log) == [line[:300] for line in lines[-12:]]


def test_the_tail_of_an_empty_log_and_of_bytes_that_are_no_text(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"")
    assert tail(log) == []
    log.write_bytes(b"a\xff\n")
    assert tail(log) == ["a\ufffd"]
