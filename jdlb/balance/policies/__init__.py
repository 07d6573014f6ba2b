"""The registry of policies: name -> constructor, one file a policy.

Knows every policy; no policy knows it.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jdlb.balance.policies.boa import boa
from jdlb.balance.policies.dlb import dlb
from jdlb.balance.policies.equal import equal
from jdlb.balance.policies.fixed import fixed
from jdlb.balance.policies.lb_bsp import lb_bsp
from jdlb.balance.policies.lb_bsp_cpu import lb_bsp_cpu
from jdlb.balance.policies.lbb import lbb
from jdlb.balance.policies.makespan import makespan
from jdlb.balance.policies.omnilearn import omnilearn
from jdlb.balance.policies.protocol import AnyPolicy
from jdlb.balance.policies.self_adaptive import self_adaptive
from jdlb.balance.policies.static import static
from jdlb.errors import UserError, unknown_name

POLICIES: Mapping[str, Callable[..., AnyPolicy]] = MappingProxyType(
    {
        "boa": boa,
        "dlb": dlb,
        "equal": equal,
        "fixed": fixed,
        "lb_bsp": lb_bsp,
        "lb_bsp_cpu": lb_bsp_cpu,
        "lbb": lbb,
        "makespan": makespan,
        "omnilearn": omnilearn,
        "self_adaptive": self_adaptive,
        "static": static,
    }
)


def get(name: str, **options: Any) -> AnyPolicy:
    """The policy of that name, built with its options.

    >>> get("fixed", shares=[0.5, 0.5]).name
    'fixed'

    Raises:
      UserError: an unknown name, an option that the policy does not take, or one that
        it needs and is missing.
    """
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    signature = inspect.signature(POLICIES[name])
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no options"
        raise UserError(f"policy {name!r}: {error}; it takes {takes}") from error
    return POLICIES[name](**options)
