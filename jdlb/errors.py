"""The one exception that means "the user can fix this".

Raised where input enters, before any device work, with the value that was wrong and
what to do about it. Commands print its message as one line and exit with status 2.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: one line that says the value and the remedy."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a registry: lists the known names.

    >>> print(unknown_name("policy", "dbl", ["dlb", "equal"]))
    unknown policy 'dbl': did you mean 'dlb'? Known: dlb, equal
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}:{hint} Known: {', '.join(names)}")


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of its input: exit status 1.

    Its message is one line that names the worker where there is one.
    """
