"""The base class of eviction policies. A policy chooses slots, and the memory writes them.

Shapes: B newcomers, A descriptor, K slots, k occupied slots, R slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stream_ssl.memory.checks import check_instance
from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.scores import Linear, Score
from stream_ssl.memory.shares import Turns


@dataclass(frozen=True, slots=True)
class Feedback:
    """The outcome of one batch, for policies that learn.

    Attributes:
        inserted: newcomers that joined, including those that the batch evicted again.
        evicted: samples that left.
        refused: newcomers that never joined.
        added: samples offered to the memory so far, including this batch.
    """

    inserted: int
    evicted: int
    refused: int
    added: int


class Policy(ABC):
    """An eviction policy: it chooses the slot that each newcomer takes in a full memory.

    A policy serves one memory. It reads the memory's columns, usually `descriptors`, and never
    writes them. The policy's own values (a sum of rows, a generator, the head of a queue) form its
    state. The memory saves this state with its own.
    """

    name: ClassVar[str] = ""
    """The name in states and error messages.

    A subclass without a name gets the name of its class.
    """

    across_ranks: bool = False
    """Whether the policy chooses among the slots of all ranks, the same on each rank."""

    score: Score = Linear()
    """The score h with which this policy counts duplicates."""

    columns: Columns

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__qualname__

    def settings(self) -> dict[str, Any]:
        """Return the settings, except the score, that a loaded state must match, as JSON."""
        return {}

    def bind(self, columns: Columns, seed: int) -> None:
        """Serve the memory with these columns, starting from their current rows.

        The memory calls this method once at construction. It calls it again when the dtype or
        device of the rows changes, when samples are removed, and on empty columns before it loads a
        state.

        Args:
            columns: the memory's columns, which the policy reads at every later call.
            seed: the seed for random choices, different from the memory's own. A removal changes
                it, so a policy that needs the seed later must keep it in `state`.
        """
        del seed
        self.columns = columns

    def bind_after_removal(self, columns: Columns, seed: int, share: float) -> None:
        """Serve the memory with the samples that a removal left.

        A policy overrides this method if it counts samples that are not in its rows.

        Args:
            columns, seed: see `bind`.
            share: the share of the former samples that is left, in [0, 1).
        """
        del share
        self.bind(columns, seed)

    def on_insert(self, rows: Rows) -> None:
        """Update the policy after newcomers filled empty slots, the last of the occupied slots."""
        del rows

    @abstractmethod
    def choose(self, rows: Rows) -> Tensor:
        """Choose the slot of each newcomer, one after the other, in a full memory.

        Returns:
            The slots of the first b >= 1 newcomers, int64 [b] on the CPU. The memory writes these
            newcomers and calls again with the rest. A newcomer replaces the sample in its slot at
            that moment, possibly an earlier newcomer. -1 refuses the newcomer.
        """

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        """Choose slots as `choose` does, under shares that forbid some slots.

        Each newcomer may take only the slots that `turns` leaves open. A newcomer whose producer is
        below its guarantee must not be refused. A policy without this method serves only memories
        without shares.
        """
        raise NotImplementedError

    @property
    def keeps_shares(self) -> bool:
        """Whether this policy supports shares, which requires its own `choose_shared`."""
        return type(self).choose_shared is not Policy.choose_shared

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """Update the policy after the descriptors of these slots changed from `before_RA`.

        All slots changed, or only some, and then only in the descriptors' columns `moving`.
        """
        del slots, before_RA

    def update(self, feedback: Feedback) -> None:
        """Learn from a finished batch, if the policy learns (DUEL, Algorithm 1, UpdatePolicy)."""
        del feedback

    def counts(self) -> Tensor:
        """Return N(j) of the occupied slots, float64 [k] (DUEL, eq. 5)."""
        return self.score.counts(self.columns.descriptor_kA)

    @property
    def keeps_counts(self) -> bool:
        """Whether the policy keeps counts, so that `counts` need not compare all slots."""
        return type(self).counts is not Policy.counts

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """Return sum_k h(d_b . d_k) of each row with the occupied slots, float64 [B]."""
        return self.score.total(descriptor_BA, self.columns.descriptor_kA)

    def offered(self, descriptor_BA: Tensor) -> Tensor:
        """Return `total` of the rows that `choose` is asked for next, in this order.

        A policy overrides this method if `choose` can use what it computes here.
        """
        return self.total(descriptor_BA)

    def state(self) -> dict[str, Tensor]:
        """Return the state from which `load` continues exactly as this policy would."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`.

        The memory calls this method after it has loaded the rows.
        """
        del state

    def check(self) -> tuple[bool, str]:
        """Return (True, "") if the policy's values agree with the rows, else (False, the error)."""
        return True, ""


def described(policy: Policy) -> dict[str, Any]:
    """Return the description of a policy that is saved in a state, as JSON."""
    score = policy.score
    a_class = type(score).__repr__ is object.__repr__  # the default repr contains an address
    kind = type(score).__qualname__ if a_class else repr(score)
    return {"eviction policy": policy.name, "score": kind, **policy.settings()}


def check_free(name: str, given: Any) -> None:
    """Raise ValueError unless `given` is a policy that does not serve a memory yet."""
    remedy = "such as MostDuplicated()"
    if isinstance(given, str):
        remedy = f"build it with memory.eviction.policy({given!r})"
    check_instance(name, given, Policy, "stream_ssl.memory.eviction.Policy", remedy)
    if hasattr(given, "columns"):
        raise ValueError(f"{name} {given!r} serves another memory: build one for each")
