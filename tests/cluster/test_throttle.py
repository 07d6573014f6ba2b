"""CPU budgets: parsing of what the system says, and real processes really slowed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlb.cluster.throttle import (
    METHODS,
    Throttle,
    ThrottleError,
    cpu_quota,
    cpu_seconds,
    find_method,
    group_parents,
    open_throttle,
    remove_stale,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="budgets need Linux")

# How far the share may be from the budget. The kernel's quota is exact; the
# tolerance is for a machine that is busy with other things.
TOLERANCE = {"cgroup-v2": 0.05, "cgroup-v1": 0.05, "duty-cycle": 0.15}

BUSY = "while True: pass"


@contextlib.contextmanager
def busy_process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BUSY], process_group=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(params=METHODS)
def throttle(request) -> Iterator[Throttle]:
    method = request.param
    try:
        throttle = open_throttle(method)
    except ThrottleError as error:
        pytest.skip(str(error))
    with contextlib.closing(throttle):
        yield throttle


def share(pid: int, seconds: float) -> float:
    """Cores that a process really uses."""
    start, used = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - start)


def own_folders() -> list[Path]:
    return [
        path
        for method in ("cgroup-v2", "cgroup-v1")
        for parent in group_parents(
            method,
            Path("/proc/self/cgroup").read_text(),
            Path("/proc/self/mountinfo").read_text(),
        )
        for path in parent.glob(f"jdlb-{os.getpid()}-*")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cores", [0.3, 0.1, 0.05])
def test_a_busy_process_gets_its_budget(throttle, cores):
    tolerance = TOLERANCE[throttle.method]
    with busy_process() as process:
        throttle.attach(process.pid)
        throttle.limit(cores)
        time.sleep(0.1)
        # Never more; less only while others need the machine.
        shares = []
        while len(shares) < 5 and max(shares, default=0) < cores * (1 - tolerance):
            shares.append(share(process.pid, 1.5))
        assert max(shares) == pytest.approx(cores, rel=tolerance)
        throttle.close()


def test_a_budget_can_be_changed_and_lifted(throttle):
    with busy_process() as process:
        throttle.attach(process.pid)
        throttle.limit(0.1)
        time.sleep(0.05)
        assert share(process.pid, 0.5) < 0.15
        throttle.limit(0.3)
        time.sleep(0.05)
        assert 0.2 < share(process.pid, 0.5) < 0.4
        throttle.limit(None)
        time.sleep(0.05)
        assert share(process.pid, 0.5) > 0.45
        throttle.close()


def test_idle_time_is_not_saved_up(throttle):
    script = "import time; time.sleep(0.5)\n" + BUSY
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script], process_group=0
    ) as process:
        throttle.attach(process.pid)
        throttle.limit(0.3)
        while cpu_seconds(process.pid) < 0.03:
            time.sleep(0.01)
        assert share(process.pid, 0.3) < 0.4
        process.kill()


def test_nothing_is_left(throttle):
    with busy_process() as process:
        throttle.attach(process.pid)
        throttle.limit(0.5)
        process.kill()
    throttle.close()
    assert own_folders() == []


def test_a_group_takes_what_is_left_in_it_along():
    method = find_method()
    if method == "duty-cycle":
        pytest.skip("no writable control group here")
    throttle = open_throttle(method)
    with busy_process() as process:
        throttle.attach(process.pid)
        throttle.close()
        assert process.wait(timeout=5) == -signal.SIGKILL
    assert own_folders() == []


def test_ending_a_duty_cycle_leaves_the_process_running():
    throttle = open_throttle("duty-cycle")
    with busy_process() as process:
        throttle.attach(process.pid)
        throttle.limit(0.02)
        time.sleep(0.2)
        throttle.close()
        assert share(process.pid, 0.3) > 0.3


def test_the_method_found_works():
    method = find_method()
    assert method in METHODS
    with contextlib.closing(open_throttle(method)) as throttle:
        assert throttle.method == method
    assert own_folders() == []


@pytest.mark.parametrize("cores", [0.0, -1.0, float("nan"), float("inf"), 0.0005])
def test_a_budget_that_cannot_be_is_refused(throttle, cores):
    with busy_process() as process:
        throttle.attach(process.pid)
        with pytest.raises(ThrottleError, match="budget of"):
            throttle.limit(cores)
        process.kill()


@given(st.floats(0.001, 256))
def test_quotas_are_what_the_kernel_takes_and_give_the_budget(cores):
    quota, period = cpu_quota(cores)
    assert quota >= 1_000
    assert 10_000 <= period <= 1_000_000
    assert quota / period == pytest.approx(cores, rel=0.051)
    if cores > 0.01:
        assert quota / period == pytest.approx(cores, rel=0.005)


def test_stale_groups_are_removed_but_not_those_of_the_living(tmp_path):
    dead = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    dead.wait()
    gone = tmp_path / f"jdlb-{dead.pid}-0"
    used = tmp_path / f"jdlb-{dead.pid}-1"
    own = tmp_path / f"jdlb-{os.getpid()}-0"
    other = tmp_path / "jdlb-x-0"
    for folder in (gone, used, used / "process", own, other):
        folder.mkdir()
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([used, own, other])


V1_MOUNT = "31 30 0:27 {root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
V2_MOUNT = "31 30 0:27 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
OTHER = "29 1 0:20 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n"
CPU = "/sys/fs/cgroup/cpu"
TOP = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("method", "own", "root", "folders"),
    [
        ("cgroup-v1", "3:cpuset:/a\n2:cpu,cpuacct:/b/c\n0::/d", "/", [f"{CPU}/b/c"]),
        ("cgroup-v1", "1:cpu:/", "/", [CPU]),
        # In a container whose mount begins at its own group.
        ("cgroup-v1", "1:cpu:/docker/1", "/docker/1", [CPU]),
        ("cgroup-v1", "1:cpu:/docker/1/x", "/docker/1", [f"{CPU}/x"]),
        ("cgroup-v1", "1:cpu:/docker/2", "/docker/1", [CPU]),
        ("cgroup-v1", "1:cpu:/../2", "/", [CPU]),
        ("cgroup-v1", "1:cpuset:/\n0::/", "/", []),
        ("cgroup-v2", "0::/user/app", "/", [f"{TOP}/user/app", f"{TOP}/user"]),
        ("cgroup-v2", "0::/", "/", [TOP]),
        ("cgroup-v2", "1:cpu:/a", "/", []),
    ],
)
def test_where_groups_can_be_made(method, own, root, folders):
    mount = V1_MOUNT if method == "cgroup-v1" else V2_MOUNT
    found = group_parents(method, own + "\n", OTHER + mount.format(root=root) + "\n")
    assert found == tuple(Path(folder) for folder in folders)


def test_where_nothing_is_mounted_there_is_no_room():
    assert group_parents("cgroup-v1", "1:cpu:/\n", OTHER) == ()
    assert group_parents("cgroup-v2", "0::/\n", OTHER) == ()


def test_the_cpu_clock_of_a_process_that_is_gone():
    dead = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    dead.wait()
    with pytest.raises(ProcessLookupError):
        cpu_seconds(dead.pid)


def test_the_cpu_clock_is_that_of_the_process():
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.01)
