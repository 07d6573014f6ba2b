"""The local launcher with real processes: success, failure, interruption, cleaning."""

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdlb.cluster.launch.failure import WorkerFailed
from jdlb.cluster.launch.local import (
    LAUNCHER,
    check_speeds,
    log_path,
    run_local,
    worker_environ,
)
from jdlb.cluster.throttle import METHODS, ThrottleError, group_parents, open_throttle
from jdlb.errors import UserError

PREAMBLE = """
import os, signal, subprocess, sys, time
from jdlb.cluster.launch.channel import WorkerChannel
index = int(os.environ["JDLB_PROCESS_INDEX"])
channel = WorkerChannel.from_environ(os.environ)
"""


def run(tmp_path, script, processes=2, *, preamble=PREAMBLE, **options):
    """Run a job of one script; the events its workers sent, as (worker, event)."""
    events = []

    def on_event(worker, event):
        events.append((worker, event))
        return {"seen": len(events)}

    run_local(
        [sys.executable, "-c", preamble + script],
        processes,
        environ=os.environ,
        log_dir=tmp_path / "logs",
        **{"on_event": on_event, **options},
    )
    return events


def log(tmp_path, worker) -> str:
    return log_path(tmp_path / "logs", worker).read_text()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def groups(launcher: int) -> list[Path]:
    """Control groups of a launcher."""
    texts = [Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "mountinfo")]
    return [
        path
        for method in ("cgroup-v2", "cgroup-v1")
        for parent in group_parents(method, *texts)
        for path in parent.glob(f"jdlb-{launcher}-*")
    ]


def test_workers_know_their_places(tmp_path):
    script = """
names = ("JDLB_PROCESS_INDEX", "JDLB_PROCESS_COUNT", "JDLB_COORDINATOR")
channel.send({name: os.environ[name] for name in names} | {"group": os.getpgrp()})
print("hello from", index)
"""
    events = run(tmp_path, script, 3)
    assert events[0] == (LAUNCHER, {"event": "started", "throttle": None})
    by_worker = dict(events[1:])
    assert {e["JDLB_PROCESS_INDEX"] for e in by_worker.values()} == {"0", "1", "2"}
    assert all(str(w) == e["JDLB_PROCESS_INDEX"] for w, e in by_worker.items())
    assert {e["JDLB_PROCESS_COUNT"] for e in by_worker.values()} == {"3"}
    assert len({e["JDLB_COORDINATOR"] for e in by_worker.values()}) == 1
    assert len({os.getpgrp(), *(e["group"] for e in by_worker.values())}) == 4
    for worker in range(3):
        assert log(tmp_path, worker) == f"hello from {worker}\n"


def test_logs_are_the_users_alone(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o700)
    log_path(tmp_path / "logs", 1).write_text("of an earlier run, for all to read")
    run(tmp_path, "")
    for path in (tmp_path / "logs", *(tmp_path / "logs").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_requests_are_answered_and_last_words_heard(tmp_path):
    script = """
assert channel.request({"event": "ask"})["seen"] > 0
# More than a socket holds and one reading takes.
for number in range(5000):
    channel.send({"number": number, "padding": 100 * "."})
os._exit(0)
"""
    events = run(tmp_path, script)
    for worker in range(2):
        numbers = [e["number"] for w, e in events if w == worker and "number" in e]
        assert numbers == list(range(5000))


def test_a_failure_ends_the_others_and_is_named(tmp_path):
    script = """
channel.send({"pid": os.getpid()})
if index == 1:
    print("W0000 00:00:17.5 1 chatter.cc:1] nothing")
    sys.exit(7)
time.sleep(60)
"""
    started = time.monotonic()
    events = []
    with pytest.raises(WorkerFailed, match="worker 1 ended with exit status 7") as e:
        run(tmp_path, script, on_event=lambda w, event: events.append(event))
    assert time.monotonic() - started < 5
    assert "chatter" not in str(e.value)
    pids = [event["pid"] for event in events if "pid" in event]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_a_traceback_is_shown(tmp_path):
    with pytest.raises(WorkerFailed, match="ValueError: its own") as caught:
        run(tmp_path, "raise ValueError('its own')\n")
    assert "Traceback" in str(caught.value)


def test_a_killed_worker_is_named_with_its_signal(tmp_path):
    script = """
if index == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    with pytest.raises(WorkerFailed, match="worker 2 was killed by SIGKILL"):
        run(tmp_path, script, 3)


def test_the_cause_is_named_not_who_suffered_first(tmp_path):
    script = """
if index == 0:
    sys.exit("Gloo AllReduce failed: Connection closed by peer [127.0.0.1]:1")
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGSEGV"):
        run(tmp_path, script)


def test_a_users_error_is_handed_on_as_one_line(tmp_path):
    script = """
print("reading")
print("error: unknown policy 'x'", file=sys.stderr)
sys.exit(2)
"""
    with pytest.raises(UserError, match=r"^unknown policy 'x'$"):
        run(tmp_path, script)


def test_status_2_without_that_line_is_a_failure(tmp_path):
    with pytest.raises(WorkerFailed, match="status 2"):
        run(tmp_path, "sys.exit(2)")


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="cannot start '/no/such'"):
        run_local(["/no/such"], 1, environ=os.environ, log_dir=tmp_path)


def test_workers_that_ignore_sigterm_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("jdlb.cluster.launch.local._GRACE_SECONDS", 0.5)
    script = """
if index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
channel.request({"pid": os.getpid()})
if index == 1:
    time.sleep(0.5)
    sys.exit(1)
time.sleep(60)
"""
    pids = []
    with pytest.raises(WorkerFailed, match="worker 1"):
        run(tmp_path, script, on_event=lambda w, event: pids.append(event.get("pid")))
    assert not any(is_alive(pid) for pid in pids if pid)


def test_what_a_worker_started_ends_with_it(tmp_path):
    script = """
child = subprocess.Popen(["sleep", "60"])
channel.request({"pid": child.pid})
"""
    events = run(tmp_path, script)
    pids = [e["pid"] for _, e in events if "pid" in e]
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)), 2)


def test_an_error_in_the_handler_ends_the_job(tmp_path):
    def on_event(worker, event):
        if worker == 1:
            raise ZeroDivisionError("in the handler")

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "channel.request({})\ntime.sleep(60)", on_event=on_event)


THROTTLED = """
def share(seconds):
    start, used = time.monotonic(), time.process_time()
    while time.monotonic() - start < seconds:
        pass
    return (time.process_time() - used) / (time.monotonic() - start)

shares = [share(0.2)]
reply = channel.request({"event": "throttle", "on": True})
shares.append(share(1.0))
channel.request({"event": "throttle", "on": False})
shares.append(share(0.2))
channel.send({"shares": shares, "reply": reply, "threads": os.environ["NPROC"]})
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_budgets_hold_while_the_worker_wants_them(tmp_path, method):
    try:
        open_throttle(method).close()
    except ThrottleError as error:
        pytest.skip(str(error))
    events = run(tmp_path, THROTTLED, speeds=[0.15, 0.05], method=method)
    assert events[0] == (LAUNCHER, {"event": "started", "throttle": method})
    for worker, speed in enumerate((0.15, 0.05)):
        (event,) = [event for w, event in events if w == worker]
        assert event["reply"] == {"ok": True, "method": method}
        assert event["threads"] == "1"
        before, during, after = event["shares"]
        # The machine may be busy, so less can be reached; more cannot.
        assert 0.4 * speed < during < 1.3 * speed
        assert min(before, after) > 1.3 * speed
    assert groups(os.getpid()) == []


def test_without_speeds_there_is_nothing_to_limit(tmp_path):
    script = """
channel.send(channel.request({"event": "throttle", "on": True}))
assert os.environ.get("NPROC") is None
"""
    events = run(tmp_path, script, 1)
    assert events[1:] == [(0, {"ok": True, "method": None})]


def test_a_budget_that_is_refused_ends_the_job(tmp_path, monkeypatch):
    def refuse(self, cores):
        raise ThrottleError("refused")

    monkeypatch.setattr("jdlb.cluster.throttle.DutyCycle.limit", refuse)
    script = 'channel.request({"event": "throttle", "on": True})\ntime.sleep(60)'
    with pytest.raises(ThrottleError, match="refused"):
        run(tmp_path, script, speeds=[0.5, 0.5], method="duty-cycle")


LAUNCHING = """
import json, os, sys
from pathlib import Path
from jdlb.cluster.launch.local import run_local
def on_event(worker, event):
    print(json.dumps(event), flush=True)
    return {}
run_local([sys.executable, "-c", sys.argv[1]], 2, environ=os.environ,
    log_dir=Path(sys.argv[2]), speeds=[0.5, 0.2], on_event=on_event)
"""
WAITING = (
    PREAMBLE
    + """
channel.request({"event": "throttle", "on": True})
channel.send({"pid": os.getpid()})
while True: pass
"""
)


@pytest.fixture
def launched(tmp_path) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A launcher in a process of its own, and its workers once they run throttled."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, WAITING, str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as launcher:
        assert launcher.stdout is not None
        events = map(json.loads, launcher.stdout)
        pids = list(itertools.islice((e["pid"] for e in events if "pid" in e), 2))
        assert len(pids) == 2
        try:
            yield launcher, pids
        finally:
            launcher.kill()
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_an_interrupted_launcher_leaves_nothing(launched, signum, status):
    launcher, pids = launched
    # To the whole foreground group, as a terminal does.
    os.killpg(launcher.pid, signum)
    assert launcher.wait(timeout=15) == status
    assert not any(map(is_alive, pids))
    assert groups(launcher.pid) == []


def test_a_killed_launcher_takes_its_workers_along(tmp_path, launched):
    launcher, pids = launched
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)
    # Nobody was left to remove the groups: a later launcher with budgets does, as
    # soon as the dead are taken off the process table.
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    run(tmp_path, "", 1, speeds=[0.5])
    assert groups(launcher.pid) == []


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ([1.0], "1 speeds for 2 processes"),
        ([1.0, 0.0], "speed 0.0"),
        ([1.0, -1.0], "speed -1.0"),
        ([float("nan"), 1.0], "speed nan"),
        ([float("inf"), 1.0], "speed inf"),
        ([1.0, 0.0001], "speed 0.0001: must be at least 0.001"),
        ([1.0, 4.5], "speed 4.5: this machine has 4 cores"),
    ],
)
def test_speeds_that_cannot_be(speeds, words):
    with pytest.raises(UserError, match=words) as caught:
        check_speeds(speeds, 2, cores=4)
    assert "\n" not in str(caught.value)


def test_speeds_that_can_be():
    assert check_speeds([4.0], 1, cores=4) is None
    assert check_speeds([1.0, 0.5, 0.25], 3, cores=2) is None
    warning = check_speeds([1.0, 1.0, 0.5], 3, cores=2)
    assert warning is not None
    assert "sum to 2.5 cores but there are 2" in warning


def test_the_warning_reaches_the_caller(tmp_path, monkeypatch):
    monkeypatch.setattr("jdlb.cluster.launch.local.usable_cores", lambda: 1)
    events = run(tmp_path, "", 2, speeds=[1.0, 0.5])
    assert events[0][0] == LAUNCHER
    assert "sum to 1.5" in events[0][1]["text"]


def test_no_processes_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match="0 processes"):
        run(tmp_path, "", 0)
    with pytest.raises(UserError, match="speed 0"):
        run(tmp_path, "", 1, speeds=[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cores", "threads"), [(None, None), (0.25, "1"), (1.0, "1"), (1.5, "2")]
)
def test_a_worker_gets_as_many_threads_as_its_budget_can_use(cores, threads):
    environ = worker_environ(
        {"XLA_FLAGS": "--mine", "PATH": "/bin"},
        index=1,
        count=2,
        coordinator="127.0.0.1:5",
        channel_fd=9,
        cores=cores,
    )
    assert environ["XLA_FLAGS"] == "--mine"
    assert environ["PATH"] == "/bin"
    assert environ["JAX_PLATFORMS"] == "cpu"
    assert environ.get("NPROC") == environ.get("OMP_NUM_THREADS") == threads
