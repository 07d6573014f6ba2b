"""Host facts from the environment, and joining and leaving a job."""

import os
import re
import subprocess
import sys

import pytest

from jdlb.cluster.hosts import Host, JobFacts, join, joined, leave, parse
from jdlb.cluster.launch import local
from jdlb.cluster.launch.failure import WorkerFailed
from jdlb.errors import UserError

ALONE = JobFacts(0, 1, None, launched=False)


def job(index="1", count="3", coordinator="127.0.0.1:4000"):
    return {
        "JDLB_PROCESS_INDEX": index,
        "JDLB_PROCESS_COUNT": count,
        "JDLB_COORDINATOR": coordinator,
    }


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({}, ALONE),
        ({"JDLB_PROCESS_INDEX": ""}, ALONE),
        (job(), JobFacts(1, 3, "127.0.0.1:4000", launched=False)),
        (
            job("0", "1", "node-1:99"),
            JobFacts(0, 1, "node-1:99", launched=False),
        ),
        (
            job(coordinator="[::1]:99"),
            JobFacts(1, 3, "[::1]:99", launched=False),
        ),
        (
            {**job(), "JDLB_CHANNEL_FD": "5"},
            JobFacts(1, 3, "127.0.0.1:4000", launched=True),
        ),
        # One program in a batch script of a large allocation.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ALONE),
        ({"SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            JobFacts(0, 1, None, launched=False, scheduled=True),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            JobFacts(0, 1, None, launched=False, scheduled=True),
        ),
        # The local launcher inside one process of a scheduler.
        (
            {**job(), "SLURM_STEP_NUM_TASKS": "8"},
            JobFacts(1, 3, "127.0.0.1:4000", launched=False),
        ),
    ],
)
def test_parse(environ, facts):
    assert parse(environ) == facts


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"JDLB_PROCESS_INDEX": "0"},
            "JDLB_PROCESS_INDEX set but not JDLB_PROCESS_COUNT, JDLB_COORDINATOR",
        ),
        (job(coordinator=""), "but not JDLB_COORDINATOR"),
        (job(index="one"), "JDLB_PROCESS_INDEX='one'"),
        (job(count="2.0"), "JDLB_PROCESS_COUNT='2.0'"),
        (job(index="3"), "JDLB_PROCESS_INDEX=3: must be from 0 to 2"),
        (job(index="-1"), "JDLB_PROCESS_INDEX=-1"),
        (job(count="0"), "JDLB_PROCESS_COUNT=0: must be at least 1"),
        (job(coordinator="127.0.0.1"), "JDLB_COORDINATOR='127.0.0.1'"),
        (job(coordinator=":80"), "JDLB_COORDINATOR=':80'"),
        (job(coordinator="host:0"), "JDLB_COORDINATOR='host:0'"),
        (job(coordinator="host:99999"), "JDLB_COORDINATOR='host:99999'"),
    ],
)
def test_parse_names_the_value_that_is_wrong(environ, words):
    with pytest.raises(UserError, match=words) as caught:
        parse(environ)
    assert "\n" not in str(caught.value)


def test_a_job_of_one_process_needs_no_jax():
    script = (
        "import sys; from jdlb.cluster.hosts import *; leave(join(parse({})));"
        "from jdlb.cluster.launch import local; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_single_process_joins_as_the_lead():
    host = join(ALONE)
    assert host == Host(0, 1)
    assert host.is_lead
    leave(host)


def test_in_a_single_process_errors_pass_through():
    with pytest.raises(UserError, match="mine"), joined(ALONE):
        raise UserError("mine")


MEMBER = """
import os, time
from jdlb.cluster.hosts import joined, parse
with joined(parse(os.environ)) as host:
    import jax
    from jax.experimental import multihost_utils
    assert host.process_count == jax.process_count() == 2
    assert host.process_index == jax.process_index()
    multihost_utils.sync_global_devices("a collective")
    {body}
print("left at", time.time())
"""


def run_members(tmp_path, body: str) -> list[str]:
    """Run two members; what each logged."""
    local.run_local(
        [sys.executable, "-c", MEMBER.format(body=body)],
        2,
        environ=os.environ,
        log_dir=tmp_path,
    )
    return [local.log_path(tmp_path, worker).read_text() for worker in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_nobody_leaves_before_the_last(tmp_path, late):
    body = (
        f"time.sleep(3 * (host.process_index == {late})); print('done at', time.time())"
    )
    logs = run_members(tmp_path, body)
    done, left = (
        [float(re.findall(rf"{word} at (.*)", log)[0]) for log in logs]
        for word in ("done", "left")
    )
    assert abs(done[0] - done[1]) > 2.5
    assert min(left) >= max(done)


@pytest.mark.slow
def test_an_error_ends_all_members_at_once_and_is_named(tmp_path):
    body = """
    if host.process_index == 1:
        raise UserError("no such thing")
    multihost_utils.sync_global_devices("another")
    """
    with pytest.raises(UserError, match=r"^no such thing$"):
        run_members(tmp_path, "from jdlb.errors import UserError" + body)


@pytest.mark.slow
def test_the_worker_that_raised_is_named_not_its_peer(tmp_path):
    body = """
    if host.process_index == 1:
        raise ZeroDivisionError("own fault")
    multihost_utils.sync_global_devices("another")
    """
    with pytest.raises(
        WorkerFailed, match="worker 1 ended with exit status 1"
    ) as caught:
        run_members(tmp_path, body)
    assert "ZeroDivisionError: own fault" in str(caught.value)
