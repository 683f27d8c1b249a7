"""Checks of losses over negatives of all ranks, against one process and a float64 loop.

Shapes: B anchors of a rank, A of all ranks, M positives, N negatives of all, D dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from losses_cases import Case, case
from losses_table import VARIANTS, Known, T, known
from rank_group import together
from torch import Tensor

from stream_ssl.memory.process_group import RankGroup

BATCH, EACH = 3, 5  # anchors and negatives of a rank
SHARED = {name: one for name, one in VARIANTS.items() if one.build().across_ranks}


def differentiated(name: str, one: Case, said: Known, group: Any = None) -> list[Any]:
    """Return the loss of each anchor, the gradients of the mean, and the diagnostics."""
    leaves = [x.clone().requires_grad_() for x in (one.z_BD, one.positive_BMD, one.negative)]
    output = SHARED[name].build()(
        *leaves, one.mask_BN, same_BN=said.same_BN, prior_B=said.prior_B, group=group
    )
    output.loss.backward()
    return [output.per_anchor.detach(), *[x.grad for x in leaves], dict(output.diagnostics)]


def of_rank(whole: Case, said: Known, group: RankGroup) -> tuple[Case, Known]:
    """Return a rank's anchors and negatives, with a mask for the anchors of all ranks."""
    rows = slice(group.rank * BATCH, (group.rank + 1) * BATCH)
    columns = slice(group.rank, None, group.size)
    part = Case(
        whole.z_BD[rows],
        whole.positive_BMD[rows],
        whole.negative[columns],
        whole.mask_BN[:, columns],
    )
    return part, Known(said.same_BN[:, columns], said.prior_B[rows])


def check_losses(ranks: int) -> None:
    """Check value, gradients and diagnostics of every shared loss, in float64 and float32.

    The transferred bytes must not grow with the negatives.
    """
    whole = case(batch=ranks * BATCH, positives=2, negatives=ranks * EACH)
    whole.mask_BN[1, 1::ranks] = True  # for this anchor, one rank has no negatives
    said = known(whole)

    def work(group: RankGroup) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in SHARED:
            for dtype in (torch.float64, torch.float32):
                part, its = of_rank(cast(whole, dtype), said, group)
                *tensors, told = differentiated(name, part, its, group)
                found[f"{name} {dtype}"] = [*[x.tolist() for x in tensors], told]
        sizes = []
        for more in (1, 20):
            large = case(batch=ranks * BATCH, negatives=more * ranks * EACH)
            before = group.bytes, group.collectives
            differentiated("infonce", *of_rank(large, known(large), group), group)
            sizes.append([group.bytes - before[0], group.collectives - before[1]])
        return {**found, "sizes": sizes}

    by_rank = together(ranks, work)
    for name, variant in SHARED.items():
        *alone, diagnostics = differentiated(name, whole, said)
        twin_A = variant.twin(*whole, T, *said)
        torch.testing.assert_close(alone[0], twin_A, rtol=1e-9, atol=1e-9)
        for dtype, off in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
            parts = [rank[f"{name} {dtype}"] for rank in by_rank]
            # The mean over ranks of their means is the mean over all anchors.
            found = [
                torch.cat([torch.tensor(part[0], dtype=torch.float64) for part in parts]),
                *[torch.cat([tensor(part[i]) for part in parts]) / ranks for i in (1, 2)],
                interleaved([tensor(part[3]) for part in parts]) / ranks,
            ]
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=off, atol=off, msg=f"{name} {dtype}")
            # This is a mean over pairs, and each rank may have a different number of pairs.
            diagnostics.pop("negative_similarity", None)
            for key, value in diagnostics.items():
                mean = sum(part[4][key] for part in parts) / ranks
                assert abs(mean - value) <= 100 * off, (name, key, mean, value)
    for rank in by_rank:
        few, many = rank["sizes"]
        assert few == many
        assert many[1] <= 3


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def interleaved(parts: list[Tensor]) -> Tensor:
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


def cast(one: Case, dtype: torch.dtype) -> Case:
    return Case(*[x.to(dtype) for x in one[:3]], one.mask_BN)
