"""`python -m experiments`: flags, one call, and errors as one line."""

import sys

from experiments.commands import run
from jdlb.cluster.launch.failure import WorkerFailed
from jdlb.cluster.throttle import ThrottleError
from jdlb.errors import RunError, UserError


def main() -> int:
    """Run the command line; the exit status."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, WorkerFailed, ThrottleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: everything that was started has ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
