"""Searches: nearest rows, largest products, k-means.

faiss does a search where it was measured to be faster (docs/memory.md), and torch or numpy
otherwise. Only this file imports faiss, and only on first use: pip install faiss-cpu. Arrays are
passed by pointer, because `faiss.contrib.torch_utils`, which accepts tensors, patches faiss for the
whole process.

Shapes: B queries, C cells, D size of a row, K rows searched, k neighbours, N rows.
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
"""Whether faiss is installed, checked without importing it."""

NEAREST_FEW, NEAREST_MANY = 8, 1024
"""faiss is faster than a product for at most NEAREST_FEW and at least NEAREST_MANY queries."""

PRODUCT_ROWS = 2048
"""The number of rows from which faiss multiplies them by one query faster than numpy."""

GPU_NEIGHBOURS = 2048
"""The largest number of neighbours that faiss selects on a GPU."""

GPU_SCRATCH = 256 << 20
"""The bytes that faiss may take on a GPU besides rows and results. Its default is 1.5 GiB."""

SUMMED_STEP = 1 << 32
"""The fixed-point factor with which torch's k-means sums rows as integers.

Integer sums do not depend on the order.
"""

Array = NDArray[Any]


def nearest(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k rows with the largest cosine for each query, exactly, nearest first.

    The search reads the array itself, so overwritten rows are found with their new values.

    Args:
        z_BD: unit rows.
        row_KD: unit rows, K >= 1, of the same dtype and device.
        k: at least 1. At most K rows are returned.

    Returns:
        The cosines [B, k] and the row numbers, int64 [B, k].

    Raises:
        ValueError: an argument is out of range, or queries and rows do not match.

    >>> cosine, row = nearest(torch.eye(3)[:1], torch.eye(3), k=1)
    >>> cosine.tolist(), row.tolist()
    ([[1.0]], [[0]])
    """
    k = check_count("k", k, least=1)  # FAISS takes no integers of NumPy
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
    """Search as `faiss.knn_gpu` does, but on tensors in place. `knn_gpu` copies numpy arrays."""
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
        # Use torch's stream, so that the search waits for pending writes to the rows.
        stream = torch.cuda.current_stream(ask.device).cuda_stream
        resources.setDefaultStream(ask.device, faiss.cast_integer_to_cudastream_t(stream))
        faiss.bfKnn(resources, ask)
    return cosine_Bk, row_Bk


def top(query_D: Tensor, row_KD: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the n largest products of one query with the rows, within rounding, in any order.

    Args:
        query_D: a query of any length.
        row_KD: K rows of the same dtype and device.
        n: at least 1. At most K are returned.

    Returns:
        The products [n] and the row numbers, int64 [n].

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
    """Return the product of each row with one query, [K], in the precision of their dtype.

    Raises:
        ValueError: the query does not have the size and dtype of the rows.

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
        with np.errstate(invalid="ignore"):  # OpenBLAS may set the flag for finite rows, too
            return torch.from_numpy(row @ query)  # torch is half as fast
    faiss, product_K = load_faiss(), np.empty(len(row), np.float32)
    pointers = (faiss.swig_ptr(array) for array in (product_K, query, row))
    faiss.fvec_inner_products_ny(*pointers, row.shape[1], len(row))
    return torch.from_numpy(product_K)


def kmeans(
    z_ND: Tensor, cells: int, seed: int, rounds: int = 10, trained: int = 256
) -> tuple[Tensor, Tensor]:
    """Return unit centres found by spherical k-means, and the cell of each row.

    Float32 on the CPU uses faiss if it is installed, and everything else uses torch. The two find
    different centres of the same quality. Centres are fitted to a seeded draw of the rows.

    Args:
        z_ND: unit rows, N >= 1.
        cells: C >= 1. If N is smaller, N cells are used.
        seed: the seed of the draw and of the first centres. The same seed, rows, device and number
            of threads give the same result.
        rounds: the number of rounds, at least 1.
        trained: the largest number of rows per cell to which the centres are fitted, at least 1.

    Returns:
        Unit centres, float32 [C, D], and the cell of each row, int64 [N]. An empty cell takes rows
        from another cell. If fewer than C rows differ, some cells stay empty.

    Raises:
        ValueError: there are no rows, or fewer than one cell or round.

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
    """Return the cell whose centre has the largest cosine with each row, int64 [N].

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
        seed=seed % 2**31,  # faiss takes a C int
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, len(z_ND)),
    )
    means.train(_array(z_ND))
    centre_CD = normalize(torch.from_numpy(means.centroids.copy()), dim=1)
    lost_C = ~(torch.linalg.vector_norm(centre_CD, dim=1) > 0.5)  # rows of these cells cancel out
    centre_CD[lost_C] = z_ND[: int(lost_C.sum())]
    return centre_CD


def _centres_by_torch(z_ND: Tensor, cells: int, seed: int, rounds: int) -> Tensor:
    """Return the centres after Lloyd's rounds, starting from rows drawn with the seed."""
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
        # A cell whose rows cancel out has no direction, so it starts again like an empty one.
        lost_C = (held_C == 0) | ~(torch.linalg.vector_norm(centre_CD, dim=1) > 0.5)
        furthest_N = torch.argsort(cosine_N1[:, 0], stable=True)
        centre_CD[lost_C] = z_ND[furthest_N[: int(to_host(lost_C.sum()))]]
    return centre_CD


def check_queries(z_BD: Tensor, row_KD: Tensor) -> None:
    """Raise ValueError unless the queries are finite rows that match the searched rows."""
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
    """Write a faiss inner-product index of rows to a new file, row k under the number k.

    Returns:
        False if faiss is not installed; then no file is written.
    """
    if not HAVE_FAISS:
        return False
    index = load_faiss().IndexFlatIP(row_KD.shape[1])
    index.add(np.ascontiguousarray(row_KD, np.float32))
    try:
        str(path).encode()
    except UnicodeEncodeError:  # faiss takes no other names of files
        path.write_bytes(load_faiss().serialize_index(index))
    else:
        load_faiss().write_index(index, str(path))
    return True


@functools.cache
def load_faiss() -> Any:
    return importlib.import_module("faiss")  # untyped: its stubs lack half of the names


def _faiss_takes(row_KD: Tensor) -> bool:
    """Return whether faiss can search these rows in place, on the CPU."""
    return HAVE_FAISS and row_KD.dtype == torch.float32 and row_KD.device.type == "cpu"


@functools.cache
def _gpu_resources() -> Any:
    """Return faiss's scratch memory and streams, once per process; None without GPU code."""
    if not HAVE_FAISS or not hasattr(load_faiss(), "StandardGpuResources"):
        return None
    resources = load_faiss().StandardGpuResources()
    resources.setTempMemory(GPU_SCRATCH)
    return resources


def _array(row_ND: Tensor) -> Array:
    return np.ascontiguousarray(row_ND.detach().numpy())
