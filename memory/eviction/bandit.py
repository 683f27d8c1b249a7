"""A policy that learns: which sharpness of h makes the memory most diverse.

The worked example of DUEL's learned policy (Algorithm 1, UpdatePolicy).

Shapes: A arms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from memory.checks import check_count, check_number
from memory.columns import Columns
from memory.compute import to_host
from memory.eviction.base import Feedback
from memory.eviction.most_duplicated import MostDuplicated
from memory.scores import VonMisesFisher
from memory.stats import effective_rank

NOT_YET = -1.0


class Arms:
    """Discounted epsilon-greedy: the arm of the best mean reward, each reward counting less by a
    factor for every later one, so that what was best may change.

    Args:
        count: A >= 1.
        explore: the share of choices made uniformly, in [0, 1].
        discount: that factor, in (0, 1].
        generator: of the choices.
    """

    def __init__(
        self, count: int, explore: float, discount: float, generator: torch.Generator
    ) -> None:
        self._explore, self._discount, self._generator = explore, discount, generator
        self.sum_A = torch.zeros(count, dtype=torch.float64)
        self.weight_A = torch.zeros(count, dtype=torch.float64)

    def reward(self, arm: int, reward: float) -> None:
        """What this arm brought."""
        self.sum_A *= self._discount
        self.weight_A *= self._discount
        self.sum_A[arm] += reward
        self.weight_A[arm] += 1

    def choose(self) -> int:
        """Arms that were never tried first; of equal means the lowest."""
        dice, arm = torch.rand(2, generator=self._generator, dtype=torch.float64).tolist()
        if bool((self.weight_A == 0).any()):
            return int((self.weight_A == 0).to(torch.int64).argmax())
        if dice < self._explore:
            return int(arm * len(self.sum_A))
        return int((self.sum_A / self.weight_A).argmax())


class KappaBandit(MostDuplicated):
    """MostDuplicated under VonMisesFisher(kappa), where a bandit picks kappa among arms.

    An arm holds for an interval of batches into a full memory, and until K newcomers have joined;
    its reward is the change of the memory's effective classes since it was chosen.

    A switch counts all duplicates anew, in one stall of O(K^2 D). That cost what 0.6 to 1.0 K
    newcomers do, so K of them between choices keep the stalls to the cost of the evictions. A stall
    took 4 s of one core at K = 16,384 and D = 128, and takes 16 times as much at 65,536;
    index="ivf" took 1 s at 32,768.

    Args:
        kappas: the arms, each > 0, distinct.
        interval: fewest batches between choices, at least 1.
        explore: share of choices made uniformly, in [0, 1].
        discount: of older rewards with each newer one, in (0, 1].
        index: of MostDuplicated, whose counts "ivf" makes approximate.

    >>> KappaBandit(kappas=(0.05, 0.2)).score
    VonMisesFisher(kappa=0.05)
    """

    name = "kappa-bandit"

    def __init__(
        self,
        kappas: Sequence[float] = (0.1, 0.02, 0.05, 0.2, 0.5),
        interval: int = 32,
        explore: float = 0.1,
        discount: float = 0.95,
        index: Literal["exact", "ivf", "auto"] = "exact",
    ) -> None:
        if not isinstance(kappas, Sequence) or not 1 <= len(set(kappas)) == len(kappas):
            raise ValueError(f"kappas are {kappas!r}: must be distinct numbers, and one at least")
        self._scores = [VonMisesFisher(kappa) for kappa in kappas]
        check_count("interval", interval, 1, "batch")
        if not 0 <= check_number("explore", explore) <= 1:
            raise ValueError(f"explore is {explore}: must be a share, in [0, 1]")
        if not 0 < check_number("discount", discount) <= 1:
            raise ValueError(f"discount is {discount}: must lie in (0, 1]")
        self._interval, self._explore, self._discount = interval, explore, discount
        super().__init__(self._scores[0], index=index)
        self.across_ranks = False  # an arm's reward would be of one shard

    def bind(self, columns: Columns, seed: int) -> None:
        self._arm, self._seed, self.score = 0, seed, self._scores[0]
        super().bind(columns, seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.arms = Arms(len(self._scores), self._explore, self._discount, self._generator)
        self._batches = self._joined = 0  # since the arm was chosen
        self._before = NOT_YET  # effective classes when the interval began

    def settings(self) -> dict[str, Any]:
        return {
            "kappas": [score.kappa for score in self._scores],
            "interval": self._interval,
            "explore": self._explore,
            "discount": self._discount,
            **super().settings(),
        }

    @property
    def kappa(self) -> float:
        """Of the present arm."""
        return self._scores[self._arm].kappa

    def _pull(self, arm: int) -> None:
        """Rule by this arm from now on."""
        self._arm, self.score = arm, self._scores[arm]
        self._counts = self._engine(self.columns, self._seed)

    def update(self, feedback: Feedback) -> None:
        columns = self.columns
        if columns.occupied < columns.capacity:
            return
        if self._before == NOT_YET:
            self._before = effective_rank(columns.descriptors)
            return
        self._batches += 1
        self._joined += feedback.inserted
        if self._batches >= self._interval and self._joined >= columns.capacity:
            now = effective_rank(columns.descriptors)
            self.arms.reward(self._arm, now - self._before)
            self._batches, self._joined, self._before = 0, 0, now
            arm = self.arms.choose()
            if arm != self._arm:
                self._pull(arm)

    def state(self) -> dict[str, Tensor]:
        return {
            "arm": torch.tensor([self._arm, self._batches, self._joined]),
            "before": torch.tensor([self._before], dtype=torch.float64),
            "sums": self.arms.sum_A.clone(),
            "weights": self.arms.weight_A.clone(),
            "generator": self._generator.get_state(),
            **{f"inner.{name}": value for name, value in super().state().items()},
        }

    def load(self, state: dict[str, Tensor]) -> None:
        arm, self._batches, self._joined = state["arm"].tolist()
        self._before = float(state["before"])
        self.arms.sum_A = to_host(state["sums"]).clone()
        self.arms.weight_A = to_host(state["weights"]).clone()
        self._generator.set_state(to_host(state["generator"]))
        if arm != self._arm:
            self._pull(arm)
        super().load({n[6:]: value for n, value in state.items() if n.startswith("inner.")})
