"""Numbers that say how a memory is doing. They are returned; exporting them is others' work.

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
"""Pairs of slots compared at most for counts, where the policy keeps none."""

MOST_ROWS = 1 << 17
"""Slots counted at most by linear h, whose counts nobody keeps: each is one product."""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A memory at one moment. Ages and staleness are in samples offered since. On several ranks
    of one shard, but for what was added, inserted, evicted and refused, found and merged.

    Attributes:
        occupancy: occupied slots, of `capacity`.
        added: samples offered so far; each was inserted or refused.
        inserted: samples that joined; those beyond the occupied slots were evicted.
        evicted: samples that left.
        refused: samples that never joined, refused duplicates and those merged included.
        expected_collisions: mean h over pairs of distinct slots (DUEL, Definition 2); 0 below two.
        effective_rank: exponential of the entropy of the spectrum of Z^T Z / k, from 1 to D.
        age_p50, age_p90, age_max: since the samples of the occupied slots arrived.
        duplicates: samples found near-duplicates at admission, let in or not.
        merged: samples merged into another's multiplicity.
        count_mean, count_p50, count_p90, count_max: duplicate counts N(j) (DUEL, eq. 5) of the
            slots counted.
        counted: how many slots that is: all occupied ones, unless the policy keeps no counts and
            they are too many. Then those counted are spread evenly over the slots, and
            `expected_collisions` is the mean over them.
        stale_p50, stale_p90, stale_max: since the embeddings were computed.
        turnover: share of the occupied slots whose sample is among the last `capacity` offered;
            1 for a queue.
        multiplicity_mean: samples that a slot stands for, itself included.
        drift_mean, drift_min: cosine of old and new embeddings at the last re-encoding; 1 before
            any.
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
    """The numbers of this moment; `drift` is the mean and the least of the last re-encoding."""
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
    """N(j), float64: of all occupied slots where that is cheap, else of some spread over them."""
    # On several ranks no other is asked: all keep exact counts, of linear h too.
    k, linear = columns.occupied, isinstance(policy.score, Linear) and columns.group.size == 1
    kept = policy.keeps_counts and not linear
    counted = MOST_ROWS if linear else MOST_PAIRS // max(1, k)
    if kept or k <= counted:
        return policy.counts()
    slots = torch.arange(max(1, counted), device=columns.device) * k // max(1, counted)
    row_SA = columns.descriptors[slots]
    return policy.total(row_SA) - policy.score.own(row_SA)


def effective_rank(z_kD: Tensor) -> float:
    """exp of the entropy of the eigenvalues of Z^T Z / k, which sum to 1; 0 for no rows.

    Orthogonal classes of equal size give their number: c classes, c equal eigenvalues.

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
        gram_DD += block_bD.T @ block_bD  # in the rows' precision; the sum of blocks in float64
    return spectral_rank(gram_DD)


def spectral_rank(moment_DD: Tensor) -> float:
    """Effective rank (Roy and Vetterli, 2007) of rows by their second moment, Z^T Z times any
    positive factor and not centred: exp of the entropy of its spectrum. In [1, D]; 0 for zeros.

    Raises:
        ValueError: a moment that is not finite.
    """
    if not bool(torch.isfinite(moment_DD).all()):
        raise ValueError("the second moment is not finite; leave such embeddings out of it")
    share_D = torch.linalg.eigvalsh(moment_DD.double()).clamp_(min=0)
    total = float(share_D.sum())
    if total <= 0.0:
        return 0.0
    return math.exp(float(torch.special.entr(share_D / total).sum()))


def effective_cells(z_kD: Tensor, cells: int, seed: int) -> float:
    """exp of the entropy of the sizes of k-means cells, from 1 to `cells`; 0 for no rows.

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
    """The values that these shares of `values` do not exceed (nearest rank); 0 for none.

    >>> percentiles(torch.arange(1, 11), (0.5, 0.9, 1.0))
    [5.0, 9.0, 10.0]
    """
    if len(values) == 0:
        return [0.0 for _ in at]
    ordered = torch.sort(values).values
    ranks = [max(0, math.ceil(share * len(ordered)) - 1) for share in at]
    return [float(value) for value in ordered[ranks].tolist()]
