"""Statistics of a memory's contents. This module computes them and does not export them.

Shapes: C cells, D embedding, A descriptor, k occupied slots, S slots counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stream_ssl.memory.checks import check_count
from stream_ssl.memory.columns import Columns
from stream_ssl.memory.index import kmeans
from stream_ssl.memory.scores import BLOCK_ELEMENTS, Linear

if TYPE_CHECKING:
    from stream_ssl.memory.admission import Totals
    from stream_ssl.memory.eviction.base import Policy

MOST_PAIRS = 1 << 24
"""The largest number of slot pairs to compare for counts that the policy does not keep."""

MOST_ROWS = 1 << 17
"""The largest number of slots to count with linear h. No policy keeps these counts."""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Statistics of a memory at one moment.

    Ages and staleness are measured in samples offered since then. On several ranks they describe
    one shard, except added, inserted, evicted, refused, duplicates and merged, which cover all
    ranks.

    Attributes:
        occupancy: the number of occupied slots.
        capacity: the number of slots.
        added: samples offered so far. Each was inserted or refused.
        inserted: samples that joined. Those that no longer occupy a slot were evicted.
        evicted: samples that left.
        refused: samples that never joined, including refused and merged near-duplicates.
        expected_collisions: the mean h over pairs of distinct slots (DUEL, Definition 2); 0 with
            fewer than two slots.
        effective_rank: the exponential of the entropy of the spectrum of Z^T Z / k, from 1 to D.
        age_p50, age_p90, age_max: percentiles and maximum of the time since the samples arrived.
        duplicates: near-duplicates found at admission, whether admitted or not.
        merged: samples merged into the multiplicity of another.
        count_mean, count_p50, count_p90, count_max: duplicate counts N(j) of the counted slots
            (DUEL, eq. 5).
        counted: the number of slots counted. It is less than all occupied slots only if the policy
            keeps no counts and the memory is large. Then the counted slots are spread evenly over
            the memory, and `expected_collisions` is the mean over them.
        stale_p50, stale_p90, stale_max: percentiles and maximum of the time since the embeddings
            were computed.
        turnover: the share of occupied slots whose sample is among the last `capacity` samples
            offered; 1 for a queue.
        multiplicity_mean: the mean number of samples that a slot represents, including itself.
        drift_mean, drift_min: the cosine of old and new embeddings at the last re-encoding; 1
            before the first.
    """

    occupancy: int
    capacity: int
    added: int
    inserted: int
    evicted: int
    refused: int
    expected_collisions: float
    effective_rank: float
    age_p50: float
    age_p90: float
    age_max: float
    duplicates: int = 0
    merged: int = 0
    count_mean: float = 0.0
    count_p50: float = 0.0
    count_p90: float = 0.0
    count_max: float = 0.0
    counted: int = 0
    stale_p50: float = 0.0
    stale_p90: float = 0.0
    stale_max: float = 0.0
    turnover: float = 0.0
    multiplicity_mean: float = 0.0
    drift_mean: float = 1.0
    drift_min: float = 1.0


def measure(columns: Columns, policy: Policy, totals: Totals, drift: Tensor) -> MemoryStats:
    """Return the current statistics.

    Args:
        columns: the columns of the memory.
        policy: the memory's policy, which may keep duplicate counts.
        totals: the totals of all samples offered so far.
        drift: the mean and the minimum drift of the last re-encoding, float64 [2].
    """
    k = columns.occupied
    age_k, stale_k = totals.added - columns.born[:k], totals.added - columns.encoded[:k]
    count_S = some_counts(columns, policy)
    spread: dict[str, Any] = {}
    for name, values in (("age", age_k), ("stale", stale_k), ("count", count_S)):
        of = percentiles(values, (0.5, 0.9, 1.0))
        spread |= {f"{name}_p50": of[0], f"{name}_p90": of[1], f"{name}_max": of[2]}
    count_mean = float(count_S.mean()) if k else 0.0
    over = columns.occupied_of_all if policy.keeps_counts else k
    drift_mean, drift_min = drift.tolist()
    return MemoryStats(
        occupancy=k,
        capacity=columns.capacity,
        inserted=totals.inserted,
        expected_collisions=count_mean / max(1, over - 1),
        effective_rank=effective_rank(columns.z_kD),
        count_mean=count_mean,
        counted=len(count_S),
        turnover=int((age_k <= columns.capacity_of_all).sum()) / max(1, k),
        multiplicity_mean=float(columns.multiplicity[:k].sum()) / max(1, k),
        drift_mean=drift_mean,
        drift_min=drift_min,
        **asdict(totals),
        **spread,
    )


def some_counts(columns: Columns, policy: Policy) -> Tensor:
    """Return N(j), float64: of all occupied slots if that is cheap, else of an even selection."""
    # Several ranks keep exact counts for linear h too, so no communication is needed.
    k, linear = columns.occupied, isinstance(policy.score, Linear) and columns.group.size == 1
    kept = policy.keeps_counts and not linear
    counted = MOST_ROWS if linear else MOST_PAIRS // max(1, k)
    if kept or k <= counted:
        return policy.counts()
    slots = torch.arange(max(1, counted), device=columns.device) * k // max(1, counted)
    row_SA = columns.descriptors[slots]
    return policy.total(row_SA) - policy.score.own(row_SA)


def effective_rank(z_kD: Tensor) -> float:
    """Return exp of the entropy of the eigenvalues of Z^T Z / k, which sum to 1; 0 for no rows.

    Rows of c orthogonal classes of equal size give c equal eigenvalues, so the result is c.

    >>> round(effective_rank(torch.eye(4).repeat(3, 1)), 6)
    4.0
    """
    if len(z_kD) == 0:
        return 0.0
    dim = z_kD.shape[1]
    gram_DD = torch.zeros(dim, dim, dtype=torch.float64, device=z_kD.device)
    step = max(1, BLOCK_ELEMENTS // dim)
    for start in range(0, len(z_kD), step):
        block_bD = z_kD[start : start + step]
        gram_DD += block_bD.T @ block_bD  # rows' precision; blocks are summed in float64
    return spectral_rank(gram_DD)


def spectral_rank(moment_DD: Tensor) -> float:
    """Return the effective rank (Roy and Vetterli, 2007) of rows, given their second moment.

    It is exp of the entropy of the spectrum, in [1, D], or 0 if the moment is zero.

    Args:
        moment_DD: Z^T Z of the rows, not centred, times any positive factor.

    Raises:
        ValueError: the moment is not finite.
    """
    if not bool(torch.isfinite(moment_DD).all()):
        raise ValueError("the second moment is not finite; leave such embeddings out of it")
    share_D = torch.linalg.eigvalsh(moment_DD.double()).clamp_(min=0)
    total = float(share_D.sum())
    if total <= 0.0:
        return 0.0
    return math.exp(float(torch.special.entr(share_D / total).sum()))


def effective_cells(z_kD: Tensor, cells: int, seed: int) -> float:
    """Return exp of the entropy of the k-means cell sizes, from 1 to `cells`; 0 for no rows.

    >>> round(effective_cells(torch.eye(4).repeat(3, 1), cells=4, seed=0), 6)
    4.0
    """
    check_count("cells", cells, least=1)
    if len(z_kD) == 0:
        return 0.0
    _, cell_k = kmeans(z_kD, cells, seed)
    share_C = torch.bincount(cell_k, minlength=cells).to(torch.float64) / len(cell_k)
    return math.exp(float(torch.special.entr(share_C).sum()))


def percentiles(values: Tensor, at: tuple[float, ...]) -> list[float]:
    """Return the percentiles of `values` by nearest rank; 0 if there are no values.

    >>> percentiles(torch.arange(1, 11), (0.5, 0.9, 1.0))
    [5.0, 9.0, 10.0]
    """
    if len(values) == 0:
        return [0.0 for _ in at]
    ordered = torch.sort(values).values
    ranks = [max(0, math.ceil(share * len(ordered)) - 1) for share in at]
    return [float(value) for value in ordered[ranks].tolist()]
