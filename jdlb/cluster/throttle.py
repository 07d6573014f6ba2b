"""CPU budgets for processes: how a fast machine plays a slow one, truly slower.

Three ways, one protocol: a quota of a control group (version 2 or 1), enforced by the
kernel; and, where groups are not writable, stopping and continuing the process by
signals. Must not know what the processes do. Linux only; elsewhere `open_throttle`
says so.

Budgets are in cores: 0.5 is half of one core's time. The period is 10 ms, because
with the kernel's default of 100 ms a step of 100 ms comes in bursts.
"""

import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Protocol, final

from jdlb.errors import UserError

PERIOD_MICROSECONDS = 10_000
# The kernel takes no quota below 1 ms and no period above 1 s.
SMALLEST_QUOTA_MICROSECONDS = 1_000
SMALLEST_CORES = 0.001

# How long a group may keep its ended processes before it counts as not removable.
_REMOVAL_SECONDS = 5.0

METHODS = ("cgroup-v2", "cgroup-v1", "duty-cycle")

# A launcher with many workers must not spend the cores they are to share.
_SHORTEST_PAUSE_SECONDS = 0.0005

_numbers = itertools.count()


class ThrottleError(RuntimeError):
    """A budget could not be applied, lifted or cleaned up."""


class Throttle(Protocol):
    """A budget that processes can be put under."""

    @property
    def method(self) -> str:
        """One of `METHODS`."""
        ...

    def attach(self, pid: int) -> None:
        """Put a child process of this one, and what it will start, under the budget.

        Duty cycling measures the process alone, and stops its process group, which
        it must lead.
        """
        ...

    def limit(self, cores: float | None) -> None:
        """Set the budget, in cores; None lifts it.

        Raises:
          ThrottleError: it could not be applied.
        """
        ...

    def close(self) -> None:
        """Lift the budget and leave nothing behind; kills what is left in a group.

        Raises:
          ThrottleError: the group is still there after some seconds.
        """
        ...


def open_throttle(method: str) -> Throttle:
    """A new throttle without a budget yet, for one process and its children.

    Raises:
      ThrottleError: `method` does not work here (`find_method` names one that does).
    """
    if method == "duty-cycle":
        return DutyCycle()
    name = f"jdlb-{os.getpid()}-{next(_numbers)}"
    problem: OSError | None = None
    for parent in _parents_here(method):
        if method == "cgroup-v2":
            # Most often passed on already, or not ours to pass on: making the group
            # shows what holds.
            with contextlib.suppress(OSError):
                _write(parent / "cgroup.subtree_control", "+cpu")
        try:
            return ControlGroup(method, parent / name)
        except OSError as error:
            problem = error
    raise ThrottleError(f"{method} does not work here: {problem or 'not mounted'}")


def find_method() -> str:
    """The best of `METHODS` that works for this process, found by trying.

    Removes control groups that launchers which are dead by now left behind.

    Raises:
      UserError: none does.
    """
    if sys.platform != "linux":
        raise UserError(
            f"CPU budgets need Linux, this is {sys.platform}: run without speeds"
        )
    for method in ("cgroup-v2", "cgroup-v1"):
        for parent in _parents_here(method):
            remove_stale(parent)
        try:
            _try_out(method)
        except ThrottleError:
            continue
        return method
    return "duty-cycle"


def _try_out(method: str) -> None:
    """Put a process under a budget: mounted and writable does not say it works."""
    with contextlib.closing(open_throttle(method)) as throttle:
        throttle.limit(0.5)
        command = [sys.executable, "-I", "-S", "-c", "input()"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                throttle.attach(process.pid)
            finally:
                process.kill()


def remove_stale(parent: Path) -> None:
    """Remove empty groups under `parent` whose launcher does not live any more."""
    for path in parent.glob("jdlb-*-*"):
        match = re.fullmatch(r"jdlb-(\d+)-\d+", path.name)
        if match and not Path("/proc", match[1]).exists():
            # Not empty, or another launcher was faster: not ours to remove.
            with contextlib.suppress(OSError):
                path.rmdir()


def cpu_quota(cores: float) -> tuple[int, int]:
    """Quota and period in microseconds that give `cores`.

    The period is 10 ms; longer for budgets whose quota would be below 1 ms.

    >>> cpu_quota(0.25), cpu_quota(0.02)
    ((2500, 10000), (1000, 50000))

    Raises:
      ThrottleError: not a positive number, or below what the kernel can do.
    """
    if not (math.isfinite(cores) and cores >= SMALLEST_CORES):
        raise ThrottleError(
            f"budget of {cores} cores: must be at least {SMALLEST_CORES}"
        )
    period = PERIOD_MICROSECONDS
    if cores * period < SMALLEST_QUOTA_MICROSECONDS:
        period = round(SMALLEST_QUOTA_MICROSECONDS / cores)
    return max(SMALLEST_QUOTA_MICROSECONDS, round(cores * period)), period


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together (Linux).

    Raises:
      ProcessLookupError: there is no such process.
    """
    try:
        # The number of the clock "CPU time of process `pid`" (clock_getcpuclockid).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error


@final
class ControlGroup:
    """A control group with a CPU quota, in the files of one cgroup version."""

    def __init__(self, method: str, path: Path) -> None:
        """Make the group, without a budget.

        Raises:
          OSError: it cannot be made, or has no CPU quota here.
        """
        self.method = method
        self._path = path
        path.mkdir()
        try:
            self._write_quota(None)
        except OSError:
            path.rmdir()
            raise

    def attach(self, pid: int) -> None:
        """Move a process into the group; its later children are born there."""
        try:
            _write(self._path / "cgroup.procs", str(pid))
        except OSError as error:
            raise ThrottleError(
                f"process {pid} cannot enter {self._path}: {error.strerror}"
            ) from error

    def limit(self, cores: float | None) -> None:
        """Write the quota; the kernel has it in force at once."""
        try:
            self._write_quota(cores)
        except OSError as error:
            raise ThrottleError(
                f"budget of {cores} cores refused by {self.method} ({error.strerror}):"
                " the group of this process may itself be limited to less"
            ) from error

    def close(self) -> None:
        """Kill what is left in the group and remove it."""
        end = time.monotonic() + _REMOVAL_SECONDS
        while self._path.exists():
            try:
                for pid in (self._path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise ThrottleError(f"cannot remove {self._path}") from error
                # A killed process stays in its group until it has really ended.
                time.sleep(0.01)

    def _write_quota(self, cores: float | None) -> None:
        if self.method == "cgroup-v2":
            limit = "max" if cores is None else "{} {}".format(*cpu_quota(cores))
            _write(self._path / "cpu.max", limit)
            return
        # Lifted first: a new period with the old quota could exceed the parent's.
        _write(self._path / "cpu.cfs_quota_us", "-1")
        if cores is not None:
            microseconds, period = cpu_quota(cores)
            _write(self._path / "cpu.cfs_period_us", str(period))
            _write(self._path / "cpu.cfs_quota_us", str(microseconds))


def _write(path: Path, text: str) -> None:
    # Not `Path.write_text`: it would create a file that the kernel does not offer.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@final
class DutyCycle:
    """A budget kept by SIGSTOP and SIGCONT, against the CPU clock of the process.

    A thread hands out `cores` seconds of credit a second, at most one period's worth
    at a time, and stops the process while it has used more than it was given. The
    clock closes the loop: how late a signal arrives does not bend the share.
    """

    method = "duty-cycle"

    def __init__(self) -> None:
        """A budget for the process to be attached."""
        self._pid: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, pid: int) -> None:
        """Remember the process; it must lead its process group."""
        self._pid = pid

    def limit(self, cores: float | None) -> None:
        """Begin a new cycle; with None the process just runs."""
        self.close()
        if cores is None:
            return
        microseconds, period = cpu_quota(cores)
        if self._pid is None:
            raise ThrottleError("no process attached")
        self._ended.clear()
        self._thread = threading.Thread(
            target=self._cycle,
            args=(self._pid, microseconds / period, microseconds * 1e-6),
            name="jdlb-duty-cycle",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End the cycle; the process runs on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _cycle(self, pid: int, cores: float, burst: float) -> None:
        """Keep process `pid` at `cores`, with credit of at most `burst` seconds."""
        # The process ends by itself, and the thread with it.
        with contextlib.suppress(ProcessLookupError):
            try:
                self._hold(pid, cores, burst)
            finally:
                os.killpg(pid, signal.SIGCONT)

    def _hold(self, pid: int, cores: float, burst: float) -> None:
        credit, last, last_used = burst, time.monotonic(), cpu_seconds(pid)
        stopped = False
        while True:
            # As many threads as the budget has cores use credit up the fastest.
            pause = (burst - credit) / cores if stopped else credit / math.ceil(cores)
            if self._ended.wait(max(pause, _SHORTEST_PAUSE_SECONDS)):
                return
            now, used = time.monotonic(), cpu_seconds(pid)
            earned = cores * (now - last)
            credit = min(burst, credit + earned - (used - last_used))
            last, last_used = now, used
            if stopped and credit >= burst / 2:
                os.killpg(pid, signal.SIGCONT)
                stopped = False
            elif not stopped and credit <= 0:
                os.killpg(pid, signal.SIGSTOP)
                stopped = True


def group_parents(method: str, own_groups: str, mounts: str) -> tuple[Path, ...]:
    """Folders in which this process may make a control group, best first.

    The group it is in itself; for version 2 then the one above, because there a
    group with processes in it cannot pass a controller on. None where the version is
    not mounted.

    Args:
      method: "cgroup-v2" or "cgroup-v1".
      own_groups: the text of /proc/self/cgroup.
      mounts: the text of /proc/self/mountinfo.
    """
    own = _own_group(method, own_groups)
    place = _mount(method, mounts)
    if own is None or place is None:
        return ()
    root, mount = place
    # In a container the path can begin above what is mounted: then the mount point
    # is all that can be seen.
    inside = PurePosixPath(own)
    if not inside.is_relative_to(root) or ".." in inside.parts:
        return (mount,)
    folder = mount / inside.relative_to(root)
    if method == "cgroup-v1" or folder == mount:
        return (folder,)
    return (folder, folder.parent)


def _own_group(method: str, own_groups: str) -> str | None:
    """The path of this process's group in the hierarchy of the CPU controller."""
    for line in own_groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if method == "cgroup-v2":
            found = number == "0" and not controllers
        else:
            found = "cpu" in controllers.split(",")
        if found:
            return path
    return None


def _mount(method: str, mounts: str) -> tuple[str, Path] | None:
    """Root inside the hierarchy, and mount point, of the CPU controller."""
    for line in mounts.splitlines():
        # proc_pid_mountinfo(5): 4th root, 5th mount point; behind a lone hyphen the
        # type of the file system, its source and its options.
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if method == "cgroup-v2":
            found = kind == "cgroup2"
        else:
            found = kind == "cgroup" and "cpu" in options.split(",")
        if found:
            return root, Path(mount)
    return None


def _parents_here(method: str) -> tuple[Path, ...]:
    return group_parents(
        method,
        Path("/proc/self/cgroup").read_text(),
        Path("/proc/self/mountinfo").read_text(),
    )
