"""What every eviction policy is: it chooses slots; the memory carries the choice out.

Shapes: B newcomers, A descriptor, K slots, k occupied slots, R slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.scores import Linear, Score
from stream_ssl.memory.shares import Turns


@dataclass(frozen=True, slots=True)
class Feedback:
    """What became of one batch. A policy reads the columns for anything else.

    Attributes:
        inserted: newcomers of the batch that joined, those evicted again included.
        evicted: samples that left.
        refused: newcomers that never joined.
        added: samples offered to the memory so far, this batch included.
    """

    inserted: int
    evicted: int
    refused: int
    added: int


class Policy(ABC):
    """Chooses which sample makes room for each newcomer.

    A policy serves one memory. It reads the memory's columns and never writes them: `descriptors`
    where it compares samples. Its own numbers (a sum of rows, a generator, a queue's head) are its
    state, saved with the memory.
    """

    name: ClassVar[str] = ""
    """What the policy is called in states and errors; of a subclass without one, its class's."""

    across_ranks: bool = False
    """Whether it chooses among the slots of all ranks (process_group.py), alike on each."""

    score: Score = Linear()
    """The similarity score h by which duplicates are counted under this policy."""

    columns: Columns

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__qualname__

    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor that a state holds good for, beside the score, as JSON."""
        return {}

    def bind(self, columns: Columns, seed: int) -> None:
        """Serve the memory of these columns, from its present rows on. Called once by the memory,
        again when the dtype or device of its rows changes, and on empty columns before a state is
        loaded.

        Args:
            columns: the memory's, read at every later call.
            seed: for a policy that draws; distinct from the memory's own.
        """
        del seed
        self.columns = columns

    def on_insert(self, rows: Rows) -> None:
        """Newcomers were written to slots that had been empty, the last of the occupied ones."""
        del rows

    @abstractmethod
    def choose(self, rows: Rows) -> Tensor:
        """The slot of each newcomer, taken in turn, in a memory that is full.

        Returns:
            int64 [b] on the CPU, for the first b >= 1 newcomers: the memory writes these and asks
            again with the rest. A newcomer replaces who stands in its slot at that moment, perhaps
            an earlier newcomer. -1 refuses it.
        """

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        """As `choose`, where shares bar some slots: each newcomer may take those alone that `turns`
        leave open to it, and one whose producer is below its guarantee is not refused.

        A policy without this method serves memories without shares alone.
        """
        raise NotImplementedError

    @property
    def keeps_shares(self) -> bool:
        """Whether this policy can keep shares, which takes a `choose_shared` of its own."""
        return type(self).choose_shared is not Policy.choose_shared

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """The descriptors of these distinct slots were replaced; `before_RA` were the old ones."""
        del slots, before_RA

    def update(self, feedback: Feedback) -> None:
        """A batch is done: a policy that learns does so here (DUEL, Algorithm 1, UpdatePolicy)."""
        del feedback

    def counts(self) -> Tensor:
        """N(j) of the occupied slots (DUEL, eq. 5), float64 [k]."""
        return self.score.counts(self.columns.descriptor_kA)

    @property
    def keeps_counts(self) -> bool:
        """Whether `counts` is cheaper than to count."""
        return type(self).counts is not Policy.counts

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """sum_k h(d_b . d_k) of each row with the occupied slots, float64 [B]."""
        return self.score.total(descriptor_BA, self.columns.descriptor_kA)

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on exactly as this policy would."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave. Called after the rows were loaded."""
        del state

    def check(self) -> tuple[bool, str]:
        """Whether the policy's own numbers agree with the rows; if not, what is wrong."""
        return True, ""


def described(policy: Policy) -> dict[str, Any]:
    """What a state says of the policy it is of, as JSON."""
    score = policy.score
    a_class = type(score).__repr__ is object.__repr__  # whose repr would name an address
    kind = type(score).__qualname__ if a_class else repr(score)
    return {"eviction policy": policy.name, "score": kind, **policy.settings()}


def check_free(name: str, given: Any) -> None:
    """ValueError unless it is a policy that serves no memory yet."""
    if isinstance(given, Policy):
        if hasattr(given, "columns"):
            raise ValueError(f"{name} {given!r} serves another memory: build one for each")
        return
    remedy = "such as MostDuplicated()"
    if isinstance(given, type) and issubclass(given, Policy):
        remedy = f"build it with {given.__name__}()"
    elif isinstance(given, str):
        remedy = f"build it with memory.eviction.policy({given!r})"
    raise ValueError(
        f"{name} is {given!r}: must be an instance of stream_ssl.memory.eviction.Policy; {remedy}"
    )
