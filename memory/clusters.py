"""Spherical k-means: rows grouped by the direction they are nearest to.

Shapes: C cells, D embedding, N rows, T rows fitted to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from memory.arguments import check_count
from memory.by_faiss import centres_by_faiss, serves
from memory.nearest import nearest

FINE = 1 << 32
"""Steps of 1 in which the twin sums rows: as whole numbers, whose sum has no order."""


def kmeans(
    z_ND: Tensor, cells: int, seed: int, rounds: int = 10, trained: int = 256
) -> tuple[Tensor, Tensor]:
    """Centres that their rows are near to, by spherical k-means, and the cell of each row.

    Float32 on the CPU goes through faiss where it is installed, all else through the twin. The two
    find different centres of the same quality. Centres are fitted to a seeded draw of the rows.

    Args:
        z_ND: unit rows, N >= 1.
        cells: C >= 1; N where there are fewer rows.
        seed: of the draw and of the first centres. The same seed, rows, device and number of
            threads give the same answer.
        rounds: at least 1.
        trained: most rows a cell that the centres are fitted to; at least 1.

    Returns:
        Unit centres float32 [C, D], and the cell of each row, int64 [N]. A cell left empty takes
        over rows of another, but where fewer than C rows differ some stay empty.

    Raises:
        ValueError: no rows, or fewer than one cell or round.

    >>> centres, cell = kmeans(torch.eye(2)[[0, 1, 0, 1]], cells=2, seed=0)
    >>> bool(cell[0] == cell[2]), bool(cell[0] == cell[1])
    (True, False)
    """
    check_count("the number of rows", len(z_ND), least=1)
    check_count("rounds", rounds, least=1)
    cells = min(check_count("cells", cells, least=1), len(z_ND))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(z_ND), generator=generator)[: cells * max(1, trained)]
    z_TD = z_ND[drawn.to(z_ND.device)].to(torch.float32)
    if serves(z_TD) and z_TD.device.type == "cpu":
        centre_CD = centres_by_faiss(z_TD, cells, seed, rounds)
    else:
        centre_CD = centres_by_torch(z_TD, cells, seed, rounds)
    return centre_CD, cells_of(z_ND, centre_CD)


def cells_of(z_ND: Tensor, centre_CD: Tensor) -> Tensor:
    """The cell whose centre has the largest cosine with each row, int64 [N].

    >>> cells_of(torch.eye(3)[[2, 0]], torch.eye(3)).tolist()
    [2, 0]
    """
    _, cell_N1 = nearest(z_ND.to(torch.float32), centre_CD, k=1)
    return cell_N1[:, 0]


def centres_by_torch(z_ND: Tensor, cells: int, seed: int, rounds: int) -> Tensor:
    """Unit centres [C, D] by Lloyd's rounds from rows drawn by the seed; twin of faiss."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(z_ND), generator=generator)[:cells].to(z_ND.device)
    centre_CD = z_ND[first]
    for _ in range(rounds):
        cosine_N1, cell_N1 = nearest(z_ND, centre_CD, k=1)
        cell_N = cell_N1[:, 0]
        whole_ND = (z_ND.to(torch.float64) * FINE).round().to(torch.int64)
        sum_CD = torch.zeros(cells, z_ND.shape[1], dtype=torch.int64, device=z_ND.device)
        sum_CD.index_add_(0, cell_N, whole_ND)
        held_C = torch.bincount(cell_N, minlength=cells)
        moved_CD = normalize(sum_CD.to(torch.float64) / FINE, dim=1).to(torch.float32)
        # Rows that cancel out leave no direction: such a cell starts anew like an empty one.
        lost_C = (held_C == 0) | ~(torch.linalg.vector_norm(moved_CD, dim=1) > 0.5)
        furthest_N = torch.argsort(cosine_N1[:, 0], stable=True)
        centre_CD = moved_CD
        count = int(lost_C.sum())
        centre_CD[lost_C] = z_ND[furthest_N[:count]]
    return centre_CD
