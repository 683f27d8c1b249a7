"""Eviction policies: who makes room for a newcomer. A new policy is one file and one line here."""

from memory.eviction.base import Policy
from memory.eviction.most_duplicated import MostDuplicated
from memory.eviction.oldest import Oldest
from memory.eviction.reservoir import Reservoir

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (MostDuplicated, Oldest, Reservoir)
}

__all__ = ["POLICIES", "MostDuplicated", "Oldest", "Policy", "Reservoir"]
