"""What a process started by the local launcher runs first; then it becomes the worker.

A script for `python -I -S`, with the standard library only, so that it costs
milliseconds: it ties the process's life to the launcher's, waits until the launcher
has put it under its throttle, and replaces itself by the worker's command.

Arguments: the launcher's process id, then the command and its arguments. The
descriptor in JDLB_CHANNEL_FD gives one byte when the command may start.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_launcher(launcher: int) -> None:
    """Have the kernel kill this process when the launcher dies, however it dies.

    Survives the exec below, and also takes a worker that is stopped by a signal.
    """
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")


def main() -> None:
    """Become the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    _die_with_launcher(launcher)
    if not os.read(int(os.environ["JDLB_CHANNEL_FD"]), 1):
        sys.exit("the launcher is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
