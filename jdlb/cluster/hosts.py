"""Which process of the job this is: the one place where host facts enter.

`parse` reads the job environment (pure), `joined` makes the process a member of the
job and hands out its `Host`, which travels as an argument from there. Must not know
what the job computes, nor how its processes were started beyond the variables below.

JAX is imported on joining only: the launcher uses this module and stays light.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from jdlb.cluster.launch.channel import CHANNEL_FD
from jdlb.errors import RunError, UserError

PROCESS_INDEX = "JDLB_PROCESS_INDEX"
PROCESS_COUNT = "JDLB_PROCESS_COUNT"
COORDINATOR = "JDLB_COORDINATOR"

# Seconds for all processes to arrive: interpreters on slow disks take a while.
JOIN_TIMEOUT = 300
# Seconds between the first and the last process to leave.
LEAVE_TIMEOUT = 600

# Set by the two schedulers only inside one of their processes; the number of
# processes of that step. (SLURM_NTASKS is also set in a batch script, a lone process.)
_SCHEDULER_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class JobFacts:
    """What the environment says about this process's place in the job."""

    process_index: int
    process_count: int
    # "host:port" of process 0; None in a job of one process, or where JAX finds it.
    coordinator: str | None
    # Started by the local launcher: a channel to it is open.
    launched: bool
    # A scheduler started several processes: JAX finds index, count and coordinator.
    scheduled: bool = False


@dataclass(frozen=True)
class Host:
    """This process among all processes of the job."""

    process_index: int
    process_count: int

    @property
    def is_lead(self) -> bool:
        """Whether this is process 0, which decides and writes records."""
        return self.process_index == 0


def parse(environ: Mapping[str, str]) -> JobFacts:
    """The facts in an environment; without any, a job of one process.

    Raises:
      UserError: some of the three variables are missing, or a value makes no sense.

    >>> parse({}).process_count
    1
    """
    launched = CHANNEL_FD in environ
    names = (PROCESS_INDEX, PROCESS_COUNT, COORDINATOR)
    missing = [name for name in names if not environ.get(name)]
    if len(missing) == len(names):
        scheduled = any(_count(environ, name) > 1 for name in _SCHEDULER_COUNTS)
        return JobFacts(0, 1, None, launched, scheduled)
    if missing:
        given = [name for name in names if name not in missing]
        raise UserError(
            f"{', '.join(given)} set but not {', '.join(missing)}:"
            f" set all of {', '.join(names)}, or none"
        )
    index = _integer(environ, PROCESS_INDEX)
    count = _integer(environ, PROCESS_COUNT)
    if count < 1:
        raise UserError(f"{PROCESS_COUNT}={count}: must be at least 1")
    if not 0 <= index < count:
        raise UserError(
            f"{PROCESS_INDEX}={index}: must be from 0 to {count - 1},"
            f" as {PROCESS_COUNT}={count}"
        )
    coordinator = environ[COORDINATOR]
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"{COORDINATOR}={coordinator!r}: must be HOST:PORT of process 0,"
            " such as 10.0.0.1:4321"
        )
    return JobFacts(index, count, coordinator, launched)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name}={environ[name]!r}: must be a whole number") from None


def _count(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def join(facts: JobFacts) -> Host:
    """Connect to the other processes; call once, before any other use of JAX."""
    if facts.process_count == 1 and not facts.scheduled:
        return Host(0, 1)
    import jax

    # The preemption service would swallow SIGTERM, which has to end a worker.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if facts.scheduled:
        jax.distributed.initialize(
            initialization_timeout=JOIN_TIMEOUT, shutdown_timeout_seconds=LEAVE_TIMEOUT
        )
        return Host(jax.process_index(), jax.process_count())
    jax.distributed.initialize(
        facts.coordinator,
        facts.process_count,
        facts.process_index,
        # A scheduler around the launcher knows other indices than ours.
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_TIMEOUT,
        shutdown_timeout_seconds=LEAVE_TIMEOUT,
        # All processes are on this machine: nobody else needs to reach the port.
        coordinator_bind_address=facts.coordinator if facts.launched else None,
    )
    return Host(facts.process_index, facts.process_count)


def current() -> Host:
    """Where this process is, as JAX has it; for programs that joined on their own."""
    import jax

    return Host(jax.process_index(), jax.process_count())


def leave(host: Host) -> None:
    """End the membership; returns when all processes have come here.

    JAX's shutdown is itself that barrier (of `LEAVE_TIMEOUT` seconds): nobody takes
    the coordinator, or its end of a connection, from a slower one.
    """
    if host.process_count > 1:
        import jax

        jax.distributed.shutdown()


def abort(status: int) -> NoReturn:
    """End this process at once, as a failed member of a job must.

    An ordinary exit would wait in JAX's shutdown barrier for peers that wait in a
    collective for this process: both for minutes. The closed connections tell them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def joined(facts: JobFacts) -> Iterator[Host]:
    """Membership for the length of a block.

    An exception in a job of several processes is printed (`UserError` as one line
    `error: ...` with exit status 2, `RunError` likewise with 1, others as a traceback),
    and the process aborted; in a job of one process it passes through.
    """
    host = join(facts)
    try:
        yield host
    # Whatever ends one process must end the job: peers wait for it in a collective.
    except BaseException as error:
        if host.process_count == 1:
            raise
        abort(_report(error))
    leave(host)


def _report(error: BaseException) -> int:
    """Print an exception as the interpreter would; its exit status."""
    if isinstance(error, UserError | RunError):
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    traceback.print_exception(error)
    return 1
