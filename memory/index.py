"""Every search: nearest rows, largest products, k-means.

By faiss where it was measured to win (docs/memory.md), else by a product of torch or numpy. No
other file imports faiss, and this one only when it is asked: pip install faiss-cpu. Arrays go in by
pointer: `faiss.contrib.torch_utils` would take tensors, but patches faiss for the whole process.

Shapes: B queries, C cells, D of a row, K rows searched, k neighbours, N rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory.checks import check_count
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.scores import BLOCK_ELEMENTS

HAVE_FAISS = importlib.util.find_spec("faiss") is not None
"""Looked for without importing it."""

NEAREST_FEW, NEAREST_MANY = 8, 1024
"""Queries up to which, and from which on, faiss finds the nearest faster than a product does."""

PRODUCT_ROWS = 2048
"""Rows from which on faiss multiplies them by one query faster than numpy does."""

GPU_NEIGHBOURS = 2048
"""Most neighbours that faiss selects on a GPU."""

GPU_SCRATCH = 256 << 20
"""Bytes that faiss may take on a GPU beside rows and answers; it would take 1.5 GiB."""

SUMMED_STEP = 1 << 32
"""Steps of 1 in which k-means sums rows by torch: as whole numbers, whose sum has no order."""

Array = NDArray[Any]


def nearest(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of largest cosine for each query, exactly, the nearest first.

    The array itself is searched, so a row that is overwritten is found as it is.

    Args:
        z_BD: unit rows.
        row_KD: unit rows, K >= 1, of the same dtype and device.
        k: at least 1; at most K are returned.

    Returns:
        cosine [B, k] and row number int64 [B, k].

    >>> cosine, row = nearest(torch.eye(3)[:1], torch.eye(3), k=1)
    >>> cosine.tolist(), row.tolist()
    ([[1.0]], [[0]])
    """
    check_count("k", k, least=1)
    check_queries(z_BD, row_KD)
    k = min(k, check_count("the number of rows searched", len(row_KD), least=1))
    few_or_many = len(z_BD) <= NEAREST_FEW or len(z_BD) >= NEAREST_MANY
    if _faiss_takes(row_KD) and few_or_many and len(z_BD):
        return _nearest_by_faiss(z_BD, row_KD, k)
    if row_KD.is_cuda and row_KD.dtype == torch.float32 and k <= GPU_NEIGHBOURS and len(z_BD):
        resources = _gpu_resources()
        if resources is not None:
            return _nearest_on_gpu(z_BD, row_KD, k, resources)
    return _nearest_by_product(z_BD, row_KD, k)


def _nearest_by_product(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    step = max(1, BLOCK_ELEMENTS // len(row_KD))
    found = [torch.topk(z_bD @ row_KD.T, k, dim=1) for z_bD in torch.split(z_BD, step)]
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])


def _nearest_by_faiss(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    faiss = load_faiss()
    cosine, row = faiss.knn(_array(z_BD), _array(row_KD), k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(cosine), torch.from_numpy(row)


def _nearest_on_gpu(z_BD: Tensor, row_KD: Tensor, k: int, resources: Any) -> tuple[Tensor, Tensor]:
    """What `faiss.knn_gpu` does, on tensors in place: it takes numpy arrays alone, and copies."""
    faiss, device = load_faiss(), row_KD.device
    z_BD, row_KD = z_BD.detach().contiguous(), row_KD.detach().contiguous()
    cosine_Bk = torch.empty(len(z_BD), k, dtype=torch.float32, device=device)
    row_Bk = torch.empty(len(z_BD), k, dtype=torch.int64, device=device)
    ask = faiss.GpuDistanceParams()
    ask.metric, ask.k, ask.dims = faiss.METRIC_INNER_PRODUCT, k, z_BD.shape[1]
    ask.vectors, ask.numVectors = faiss.cast_integer_to_void_ptr(row_KD.data_ptr()), len(row_KD)
    ask.queries, ask.numQueries = faiss.cast_integer_to_void_ptr(z_BD.data_ptr()), len(z_BD)
    ask.vectorType = ask.queryType = faiss.DistanceDataType_F32
    ask.vectorsRowMajor = ask.queriesRowMajor = True
    ask.outDistances = faiss.cast_integer_to_float_ptr(cosine_Bk.data_ptr())
    ask.outIndices = faiss.cast_integer_to_void_ptr(row_Bk.data_ptr())
    ask.outIndicesType = faiss.IndicesDataType_I64
    ask.device = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(ask.device):
        # On torch's own stream, so that the search waits for whoever writes the rows.
        stream = torch.cuda.current_stream(ask.device).cuda_stream
        resources.setDefaultStream(ask.device, faiss.cast_integer_to_cudastream_t(stream))
        faiss.bfKnn(resources, ask)
    return cosine_Bk, row_Bk


def top(query_D: Tensor, row_KD: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest products of one query with the rows, exactly to rounding, in no order.

    Args:
        query_D: of any length.
        row_KD: K rows of the same dtype and device.
        n: at least 1; at most K are returned.

    Returns:
        product [n] and row number int64 [n].

    >>> value, row = top(torch.tensor([1.0, 2.0, 3.0]), torch.eye(3), n=2)
    >>> sorted(row.tolist())
    [1, 2]
    """
    n = min(check_count("n", n, least=1), len(row_KD))
    product_K = products(query_D, row_KD)
    if row_KD.device.type != "cpu":
        found = torch.topk(product_K, n, sorted=False)
        return found.values, found.indices
    rest = len(row_KD) - n
    chosen = torch.from_numpy(np.argpartition(product_K.numpy(), rest)[rest:])  # topk is slower
    return product_K[chosen], chosen


def products(query_D: Tensor, row_KD: Tensor) -> Tensor:
    """The product of each row with one query [K], as the dtype of both rounds it.

    Raises:
        ValueError: the query is no row of these.

    >>> products(torch.tensor([1.0, 2.0]), torch.eye(2)).tolist()
    [1.0, 2.0]
    """
    if query_D.shape != row_KD.shape[1:] or query_D.dtype != row_KD.dtype:
        raise ValueError(
            f"the query is {query_D.dtype} {tuple(query_D.shape)}, rows are {row_KD.dtype} "
            f"{tuple(row_KD.shape)}: must be [D] and [K, D] of one dtype"
        )
    if row_KD.device.type != "cpu":
        return row_KD @ query_D
    query, row = _array(query_D), _array(row_KD)
    if not _faiss_takes(row_KD) or len(row) < PRODUCT_ROWS:
        return torch.from_numpy(row @ query)  # torch takes twice as long
    faiss, product_K = load_faiss(), np.empty(len(row), np.float32)
    pointers = (faiss.swig_ptr(array) for array in (product_K, query, row))
    faiss.fvec_inner_products_ny(*pointers, row.shape[1], len(row))
    return torch.from_numpy(product_K)


def kmeans(
    z_ND: Tensor, cells: int, seed: int, rounds: int = 10, trained: int = 256
) -> tuple[Tensor, Tensor]:
    """Centres that their rows are near to, by spherical k-means, and the cell of each row.

    Float32 on the CPU goes through faiss where it is installed, all else through torch. The two
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
    centres = _centres_by_faiss if _faiss_takes(z_TD) else _centres_by_torch
    centre_CD = centres(z_TD, cells, seed, rounds)
    return centre_CD, cells_of(z_ND, centre_CD)


def cells_of(z_ND: Tensor, centre_CD: Tensor) -> Tensor:
    """The cell whose centre has the largest cosine with each row, int64 [N].

    >>> cells_of(torch.eye(3)[[2, 0]], torch.eye(3)).tolist()
    [2, 0]
    """
    _, cell_N1 = nearest(z_ND.to(torch.float32), centre_CD, k=1)
    return cell_N1[:, 0]


def _centres_by_faiss(z_ND: Tensor, cells: int, seed: int, rounds: int) -> Tensor:
    means = load_faiss().Kmeans(
        z_ND.shape[1],
        cells,
        niter=rounds,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, len(z_ND)),
    )
    means.train(_array(z_ND))
    centre_CD = normalize(torch.from_numpy(means.centroids.copy()), dim=1)
    lost_C = ~(torch.linalg.vector_norm(centre_CD, dim=1) > 0.5)  # of rows that cancel out
    centre_CD[lost_C] = z_ND[: int(lost_C.sum())]
    return centre_CD


def _centres_by_torch(z_ND: Tensor, cells: int, seed: int, rounds: int) -> Tensor:
    """Lloyd's rounds from rows drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(z_ND), generator=generator)[:cells].to(z_ND.device)
    centre_CD = z_ND[first]
    whole_ND = (z_ND.to(torch.float64) * SUMMED_STEP).round().to(torch.int64)
    for _ in range(rounds):
        cosine_N1, cell_N1 = nearest(z_ND, centre_CD, k=1)
        cell_N = cell_N1[:, 0]
        sum_CD = torch.zeros(cells, z_ND.shape[1], dtype=torch.int64, device=z_ND.device)
        sum_CD.index_add_(0, cell_N, whole_ND)
        held_C = torch.bincount(cell_N, minlength=cells)
        centre_CD = normalize(sum_CD.to(torch.float64) / SUMMED_STEP, dim=1).to(torch.float32)
        # Rows that cancel out leave no direction: such a cell starts again like an empty one.
        lost_C = (held_C == 0) | ~(torch.linalg.vector_norm(centre_CD, dim=1) > 0.5)
        furthest_N = torch.argsort(cosine_N1[:, 0], stable=True)
        centre_CD[lost_C] = z_ND[furthest_N[: int(to_host(lost_C.sum()))]]
    return centre_CD


def check_queries(z_BD: Tensor, row_KD: Tensor) -> None:
    """ValueError unless these are finite rows, and of the kind of those searched."""
    if not (isinstance(z_BD, Tensor) and isinstance(row_KD, Tensor)):
        raise ValueError(
            f"queries are {type(z_BD).__name__}, rows {type(row_KD).__name__}: both must be "
            "tensors; torch.from_numpy makes one of an array"
        )
    if (
        z_BD.ndim != 2
        or row_KD.ndim != 2
        or z_BD.shape[1] != row_KD.shape[1]
        or z_BD.dtype != row_KD.dtype
        or z_BD.device != row_KD.device
    ):
        raise ValueError(
            f"queries are {tuple(z_BD.shape)} {z_BD.dtype} on {z_BD.device}, rows "
            f"{tuple(row_KD.shape)} {row_KD.dtype} on {row_KD.device}: must be [B, D] and [K, D] "
            "of one dtype and device"
        )
    finite_B = torch.isfinite(z_BD).all(dim=1)
    if not bool(to_host(finite_B.all())):
        raise ValueError(
            f"query row {int((~finite_B).nonzero()[0, 0])} is not finite: leave it out"
        )


def write_flat(row_KD: Array, path: Path) -> bool:
    """Write a faiss index of rows by inner product, row k under the number k, into a new file.
    False where faiss is not installed: then there is no file."""
    if not HAVE_FAISS:
        return False
    index = load_faiss().IndexFlatIP(row_KD.shape[1])
    index.add(np.ascontiguousarray(row_KD, np.float32))
    load_faiss().write_index(index, str(path))
    return True


@functools.cache
def load_faiss() -> Any:
    return importlib.import_module("faiss")  # its types lack half of the names


def _faiss_takes(row_KD: Tensor) -> bool:
    """Whether faiss can search these rows where they lie, on the CPU."""
    return HAVE_FAISS and row_KD.dtype == torch.float32 and row_KD.device.type == "cpu"


@functools.cache
def _gpu_resources() -> Any:
    """Scratch memory and streams of faiss, one set a process; None in a faiss without GPU code."""
    if not HAVE_FAISS or not hasattr(load_faiss(), "StandardGpuResources"):
        return None
    resources = load_faiss().StandardGpuResources()
    resources.setTempMemory(GPU_SCRATCH)
    return resources


def _array(row_ND: Tensor) -> Array:
    return np.ascontiguousarray(row_ND.detach().numpy())
