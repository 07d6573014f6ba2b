"""Start the processes of a job on this machine, slower than it is if wanted.

Watches them, ends them all when one fails or the user interrupts, and leaves neither
process nor control group behind. Must not know what the workers compute: their
events go to the caller, but for one, `{"event": "throttle", "on": bool}`, with which
a worker has its CPU budget put in force or lifted (start-up and compilation would
take minutes under a small budget).
"""

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdlb.cluster import hosts, throttle
from jdlb.cluster.launch import entry
from jdlb.cluster.launch.channel import (
    CHANNEL_FD,
    Event,
    EventHandler,
    LauncherChannel,
    open_channel,
)
from jdlb.cluster.launch.failure import Ending, job_error
from jdlb.cluster.launch.interruption import Interruption, noted_interruption
from jdlb.errors import UserError

# The sender of events that come from the launcher itself.
LAUNCHER = -1

# Seconds between two looks at the processes; a worker's end mostly wakes us at once.
_WATCH_SECONDS = 0.02
# Seconds in which others' failures still compete for being the first cause.
_VERDICT_SECONDS = 0.5
# Seconds from SIGTERM to SIGKILL.
_GRACE_SECONDS = 5.0

# What sizes the thread pools of XLA, TSL, BLAS and OpenMP.
_THREAD_VARIABLES = (
    "NPROC",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_speeds(speeds: Sequence[float], processes: int, cores: int) -> str | None:
    """Check budgets (cores, one a process); a warning if they sum to above `cores`.

    Raises:
      UserError: wrong number of budgets, or one that this machine cannot give.
    """
    if len(speeds) != processes:
        raise UserError(
            f"{len(speeds)} speeds for {processes} processes: give one each"
        )
    for speed in speeds:
        if not (math.isfinite(speed) and speed > 0):
            raise UserError(f"speed {speed}: must be a number of cores above 0")
        if speed < throttle.SMALLEST_CORES:
            raise UserError(
                f"speed {speed}: must be at least {throttle.SMALLEST_CORES} core"
            )
        if speed > cores:
            raise UserError(f"speed {speed}: this machine has {cores} cores to give")
    if math.fsum(speeds) > cores:
        return (
            f"speeds sum to {math.fsum(speeds):g} cores but there are {cores}:"
            " workers will disturb each other"
        )
    return None


def worker_environ(
    environ: Mapping[str, str],
    *,
    index: int,
    count: int,
    coordinator: str,
    channel_fd: int,
    cores: float | None,
) -> dict[str, str]:
    """The environment of one worker.

    With a budget of `cores`, its thread pools get as many threads as it takes to
    use that up: more would only take turns at the quota. NPROC is what XLA's CPU
    client goes by (`--xla_cpu_multi_thread_eigen=false` changed nothing beside it,
    on JAX 0.10.2 and 0.12). XLA_FLAGS stay the user's own.
    """
    threads = {}
    if cores is not None:
        threads = dict.fromkeys(_THREAD_VARIABLES, str(math.ceil(cores)))
    return {
        **environ,
        **threads,
        hosts.PROCESS_INDEX: str(index),
        hosts.PROCESS_COUNT: str(count),
        hosts.COORDINATOR: coordinator,
        CHANNEL_FD: str(channel_fd),
        # Several processes cannot share one GPU, and budgets are of CPU time.
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        # gRPC would send even this machine's own address through a proxy.
        "no_grpc_proxy": "127.0.0.1",
    }


def log_path(log_dir: Path, worker: int) -> Path:
    """Where the output of a worker goes."""
    return log_dir / f"worker-{worker}.log"


@dataclass
class _Worker:
    """One started process and what belongs to it."""

    index: int
    process: subprocess.Popen[bytes]
    channel: LauncherChannel
    throttle: throttle.Throttle | None
    speed: float | None
    log: Path

    def ending(self, now: float) -> Ending:
        """How the process ended, seen at `now` (monotonic seconds)."""
        return Ending(self.index, self.process.returncode, now, self.log)

    def limit(self, on: bool) -> Event:
        """Put the budget in force, or lift it; the answer to the worker."""
        if self.throttle is None:
            return {"ok": True, "method": None}
        self.throttle.limit(self.speed if on else None)
        return {"ok": True, "method": self.throttle.method}

    def signal_group(self, signum: int) -> None:
        """Signal the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


def _silent(worker: int, event: Event) -> Event | None:
    return None


def run_local(
    command: Sequence[str],
    processes: int,
    *,
    environ: Mapping[str, str],
    log_dir: Path,
    speeds: Sequence[float] | None = None,
    on_event: EventHandler = _silent,
    method: str | None = None,
) -> None:
    """Run `command` in several processes that form one job; returns when all exit 0.

    Args:
      command: program and arguments, the same for all.
      processes: how many.
      environ: the environment to start from (`worker_environ` adds to it).
      log_dir: where each worker's output goes, readable by the user alone.
      speeds: CPU budgets in cores, one a process; in force from the moment that the
        worker asks for it. None: no budgets.
      on_event: gets the workers' events, and from `LAUNCHER` `{"event": "started",
        "throttle": method or None}` and `{"event": "warning", "text": ...}`. Called
        in this thread; what it raises ends the job.
      method: way of throttling, one of `throttle.METHODS`; None: the best that works.

    Raises:
      UserError: bad input, here or reported by a worker (exit status 2).
      WorkerFailed: a worker ended otherwise than with status 0; the others were ended.
      ThrottleError: a budget could not be applied.
      KeyboardInterrupt: on SIGINT, when everything is ended.
      SystemExit: on SIGTERM and SIGHUP likewise (143, 129).
    """
    if processes < 1:
        raise UserError(f"{processes} processes: must be at least 1")
    if speeds is not None:
        warning = check_speeds(speeds, processes, usable_cores())
        if warning is not None:
            on_event(LAUNCHER, {"event": "warning", "text": warning})
        method = method or throttle.find_method()
    else:
        method = None
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with noted_interruption() as interruption, _free_address() as coordinator:
        workers: list[_Worker] = []
        try:
            for index in range(processes):
                speed = None if speeds is None else speeds[index]
                workers.append(
                    _start(
                        command,
                        (index, processes),
                        coordinator,
                        environ,
                        log_path(log_dir, index),
                        speed,
                        method,
                    )
                )
            on_event(LAUNCHER, {"event": "started", "throttle": method})
            _watch(workers, on_event, interruption)
        finally:
            _end_all(workers, interruption)
        interruption.check()


@contextlib.contextmanager
def _free_address() -> Iterator[str]:
    """A free address on this machine, kept from other programs meanwhile.

    The coordinator's server binds with SO_REUSEPORT, too, and so can still have it.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reservation.getsockname()[1]}"


def _start(
    command: Sequence[str],
    place: tuple[int, int],
    coordinator: str,
    environ: Mapping[str, str],
    log: Path,
    speed: float | None,
    method: str | None,
) -> _Worker:
    """Start one worker, under its throttle from its first instruction on."""
    index, count = place
    with contextlib.ExitStack() as undo:
        budget = None
        if method is not None:
            budget = throttle.open_throttle(method)
            undo.callback(budget.close)
        channel, theirs = open_channel()
        undo.callback(channel.close)
        with theirs, open(log, "wb", opener=_open_private) as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", entry.__file__),
                    *(str(os.getpid()), *command),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environ(
                    environ,
                    index=index,
                    count=count,
                    coordinator=coordinator,
                    channel_fd=theirs.fileno(),
                    cores=speed,
                ),
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the launcher, which then ends the workers in order.
                process_group=0,
            )
        undo.callback(process.wait)
        undo.callback(process.kill)
        if budget is not None:
            budget.attach(process.pid)
        channel.release()
        undo.pop_all()
    return _Worker(index, process, channel, budget, speed, log)


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    # The mode above is for new files only.
    os.fchmod(descriptor, 0o600)
    return descriptor


def _watch(
    workers: Sequence[_Worker], on_event: EventHandler, interruption: Interruption
) -> None:
    """Serve the workers until all have ended well.

    Raises:
      UserError, WorkerFailed: one did not.
    """

    def handle(worker: int, event: Event) -> Event | None:
        if event.get("event") == "throttle":
            return workers[worker].limit(bool(event["on"]))
        return on_event(worker, event)

    running, failures = list(workers), list[Ending]()
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        while running:
            _serve(selector, handle, _WATCH_SECONDS)
            interruption.check()
            now = time.monotonic()
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                # What it started must not outlive it, in success neither.
                worker.signal_group(signal.SIGKILL)
                if worker.process.returncode != 0:
                    failures.append(worker.ending(now))
            if failures and now - failures[0].time > _VERDICT_SECONDS:
                break
        # The last words of those that have ended.
        for worker in running:
            if worker.channel in selector.get_map():
                selector.unregister(worker.channel)
        while _serve(selector, handle, 0):
            interruption.check()
    if failures:
        raise job_error(failures)


def _serve(
    selector: selectors.BaseSelector, handle: EventHandler, timeout: float
) -> bool:
    """Deliver what arrives within `timeout` seconds; False if nothing did."""
    ready = selector.select(timeout)
    for key, _ in ready:
        worker: _Worker = key.data
        if not worker.channel.serve(worker.index, handle):
            selector.unregister(worker.channel)
    return bool(ready)


def _end_all(workers: Sequence[_Worker], interruption: Interruption) -> None:
    """End what still runs, gently first, and clean up after all.

    A second Ctrl-C takes the gentleness out.
    """
    with contextlib.ExitStack() as cleaning:
        for worker in workers:
            cleaning.callback(worker.channel.close)
            if worker.throttle is not None:
                cleaning.callback(worker.throttle.close)
        running = [w for w in workers if w.process.poll() is None]
        for worker in running:
            # A small budget may not last for an orderly end within the grace.
            with contextlib.suppress(throttle.ThrottleError):
                worker.limit(False)
            worker.signal_group(signal.SIGTERM)
            worker.signal_group(signal.SIGCONT)
        signals = len(interruption.received)
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end and len(interruption.received) == signals:
            if all(w.process.poll() is not None for w in running):
                break
            time.sleep(_WATCH_SECONDS)
        for worker in running:
            worker.signal_group(signal.SIGKILL)
            worker.process.wait()
