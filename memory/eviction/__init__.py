"""Eviction policies, which choose the slot of each newcomer.

A new policy is one file and one line here.
"""

from __future__ import annotations

import importlib
from typing import Any

from stream_ssl.memory.eviction.base import Feedback, Policy
from stream_ssl.memory.eviction.duel import Duel
from stream_ssl.memory.eviction.minimum_redundancy import MinimumRedundancy
from stream_ssl.memory.eviction.most_duplicated import MostDuplicated
from stream_ssl.memory.eviction.oldest import Oldest
from stream_ssl.memory.eviction.random import Random
from stream_ssl.memory.eviction.redundant import Redundant
from stream_ssl.memory.eviction.reservoir import Reservoir

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Duel,
        MostDuplicated,
        Redundant,
        MinimumRedundancy,
        Oldest,
        Reservoir,
        Random,
    )
}

__all__ = [
    "POLICIES",
    "Duel",
    "Feedback",
    "MinimumRedundancy",
    "MostDuplicated",
    "Oldest",
    "Policy",
    "Random",
    "Redundant",
    "Reservoir",
    "policy",
]


def policy(name_or_path: str, **arguments: Any) -> Policy:
    """Return a new eviction policy, by its name or by the path of a class outside this package.

    Args:
        name_or_path: a name in POLICIES, or "module:Class" for a subclass of Policy.
        arguments: the arguments of the policy's constructor.

    Raises:
        ValueError: there is no such policy, the class is not a policy, or it does not accept these
            arguments.

    >>> policy("oldest").name
    'oldest'
    >>> policy("stream_ssl.memory.eviction.reservoir:Reservoir").name
    'reservoir'
    """
    if not isinstance(name_or_path, str):
        raise ValueError(
            f"eviction policy {name_or_path!r}: must be a name, one of {sorted(POLICIES)}, or "
            "'module:Class'; use a policy that is already built as it is"
        )
    found = POLICIES.get(name_or_path) or _from_outside(name_or_path)
    try:
        return found(**arguments)
    except TypeError as error:
        raise ValueError(
            f"eviction policy {name_or_path!r} with arguments {sorted(arguments)}: {error}; "
            f"give those of {found.__module__}.{found.__qualname__}"
        ) from error


def _from_outside(path: str) -> type[Policy]:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(
            f"eviction policy {path!r}: must be one of {sorted(POLICIES)}, or 'module:Class' of a "
            "policy from outside"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"eviction policy {path!r} cannot be imported ({error}): 'module:Class' must name a "
            "class of a module on the Python path"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(
            f"eviction policy {path!r} is {found!r}: must be a subclass of "
            "stream_ssl.memory.eviction.Policy; derive it from that"
        )
    return found
