"""The type checker that the import hook of `conftest` puts on functions."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

# A whole number will do where a float is asked for, as pyright has it.
_checker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its arguments and result checked as it runs.

    As it was where beartype cannot check a hint: `Self` outside of a decorated class,
    and protocols that are not made for run time.
    """
    try:
        return _checker(function)
    except BeartypeDecorHintException:
        return function
