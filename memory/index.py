"""Every search: nearest rows, pairs within a cosine, largest products, k-means, rows by cell.

By faiss where it was measured to win (docs/memory.md), else by a product of torch or numpy. No
other file imports faiss, and this one only when it is asked: pip install faiss-cpu. Arrays go in by
pointer: `faiss.contrib.torch_utils` would take tensors, but patches faiss for the whole process.

Shapes: B queries, C cells, D of a row, K rows searched, k neighbours, N rows, R pairs, n members.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from memory.checks import check_count, check_number
from memory.compute import columns_at_a_time, to_host
from memory.scores import BLOCK_ELEMENTS

HAVE_FAISS = importlib.util.find_spec("faiss") is not None
"""Looked for without importing it."""

NEAREST_FEW, NEAREST_MANY = 8, 1024
"""Queries up to which, and from which on, faiss finds the nearest faster than a product does."""

WITHIN_FEW = 4
"""Queries up to which faiss finds the pairs within a cosine faster than a product does."""

TOP_ROWS = 16_384
"""Rows from which on faiss multiplies them by one query faster than numpy does."""

GPU_NEIGHBOURS = 2048
"""Most neighbours that faiss selects on a GPU."""

GPU_SCRATCH = 256 << 20
"""Bytes that faiss may take on a GPU beside rows and answers; it would take 1.5 GiB."""

SUMMED_STEP = 1 << 32
"""Steps of 1 in which k-means sums rows by torch: as whole numbers, whose sum has no order."""

Array = NDArray[Any]
Ids = NDArray[np.int64]


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
    faiss = _faiss()
    cosine, row = faiss.knn(_array(z_BD), _array(row_KD), k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(cosine), torch.from_numpy(row)


def _nearest_on_gpu(z_BD: Tensor, row_KD: Tensor, k: int, resources: Any) -> tuple[Tensor, Tensor]:
    """What `faiss.knn_gpu` does, on tensors in place: it takes numpy arrays alone, and copies."""
    faiss, device = _faiss(), row_KD.device
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


def within(z_BD: Tensor, row_KD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a query and a row whose cosine is at least `cosine`, to float rounding.

    Args:
        z_BD: unit rows.
        row_KD: unit rows of the same dtype and device; may be none.
        cosine: a finite number.

    Returns:
        query int64 [R], row int64 [R] and cosine [R] of each pair, by query and then by row.

    >>> query, row, cosine = within(torch.eye(3)[1:], torch.eye(3), cosine=0.9)
    >>> query.tolist(), row.tolist(), cosine.tolist()
    ([0, 1], [1, 2], [1.0, 1.0])
    """
    check_number("cosine", cosine)
    check_queries(z_BD, row_KD)
    if _faiss_takes(row_KD) and 0 < len(z_BD) <= WITHIN_FEW and len(row_KD):
        return _within_by_faiss(z_BD, row_KD, cosine)
    return _within_by_product(z_BD, row_KD, cosine)


def _within_by_product(
    z_BD: Tensor, row_KD: Tensor, cosine: float
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.empty(0, dtype=torch.int64, device=z_BD.device)
    found = [(nothing, nothing, z_BD.new_empty(0))]
    step = columns_at_a_time(len(z_BD), z_BD.device)
    for start in range(0, len(row_KD) if len(z_BD) else 0, step):
        cosine_Bb = z_BD @ row_KD[start : start + step].T
        if bool(to_host(cosine_Bb.amax() >= cosine)):  # most blocks have no pair to be listed
            query_R, row_R = (cosine_Bb >= cosine).nonzero(as_tuple=True)
            found.append((query_R, row_R + start, cosine_Bb[query_R, row_R]))
    query_R, row_R, cosine_R = (torch.cat(part) for part in zip(*found, strict=True))
    order = torch.argsort(query_R, stable=True)  # blocks follow each other in order of their rows
    return query_R[order], row_R[order], cosine_R[order]


def _within_by_faiss(z_BD: Tensor, row_KD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
    faiss, query, row = _faiss(), _array(z_BD), _array(row_KD)
    found = faiss.RangeSearchResult(len(query))
    # faiss keeps what is strictly above the radius.
    radius = float(np.nextafter(np.float32(cosine), np.float32(-np.inf)))
    faiss.range_search_inner_product(
        faiss.swig_ptr(query),
        faiss.swig_ptr(row),
        query.shape[1],
        len(query),
        len(row),
        radius,
        found,
    )
    limit = faiss.rev_swig_ptr(found.lims, len(query) + 1).astype(np.int64)
    count = int(limit[-1])
    query_R = np.repeat(np.arange(len(query)), np.diff(limit))
    row_R = faiss.rev_swig_ptr(found.labels, count).astype(np.int64)
    cosine_R = faiss.rev_swig_ptr(found.distances, count).copy()
    order = np.lexsort((row_R, query_R))
    return (
        torch.from_numpy(query_R[order]),
        torch.from_numpy(row_R[order]),
        torch.from_numpy(cosine_R[order]),
    )


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
    if row_KD.device.type != "cpu":
        found = torch.topk(row_KD @ query_D, n, sorted=False)
        return found.values, found.indices
    query, row = _array(query_D), _array(row_KD)
    if _faiss_takes(row_KD) and len(row) >= TOP_ROWS:
        faiss, product_K = _faiss(), np.empty(len(row), np.float32)
        pointers = (faiss.swig_ptr(array) for array in (product_K, query, row))
        faiss.fvec_inner_products_ny(*pointers, row.shape[1], len(row))
    else:
        product_K = row @ query  # torch takes twice as long
    chosen = np.argpartition(product_K, len(row) - n)[len(row) - n :] if n else np.empty(0, int)
    return torch.from_numpy(product_K[chosen]), torch.from_numpy(chosen)


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
    means = _faiss().Kmeans(
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


class CellIndex:
    """Copies of rows by id, grouped into cells: inverted lists on the host.

    The members of a cell lie side by side, so that whoever counts with a cell reads one block.
    faiss keeps float32 (IndexIVFFlat with a hash table from id to place), numpy all else.

    Args:
        centre_CD: unit centres of the cells, on the CPU.
        capacity: K; ids lie in [0, K).
        dtype: of the rows.
        faiss: whether faiss keeps the lists; None: where it can.

    Attributes:
        cell_K: the cell of each id, int16 [K]; -1 where it is not held.

    >>> index = CellIndex(torch.eye(2), capacity=3, dtype=torch.float32)
    >>> index.replace(np.array([0, 2]), np.eye(2, dtype=np.float32), np.array([0, 1]))
    >>> index.replace(np.array([0]), np.eye(2, dtype=np.float32)[1:], np.array([1]))
    >>> index.members(1)[0].tolist(), index.rows(np.array([0])).tolist()
    ([2, 0], [[0.0, 1.0]])
    """

    def __init__(
        self, centre_CD: Tensor, capacity: int, dtype: torch.dtype, faiss: bool | None = None
    ) -> None:
        able = HAVE_FAISS and dtype == torch.float32
        if faiss and not able:
            raise ValueError(
                f"faiss cannot keep rows of {dtype} here: it takes float32, and must be installed "
                "(pip install faiss-cpu)"
            )
        cells, dim = centre_CD.shape
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        self.cell_K: NDArray[np.int16] = np.full(capacity, -1, dtype=np.int16)
        self._lists: _ListsByFaiss | _ListsByNumpy
        if able if faiss is None else faiss:
            self._lists = _ListsByFaiss(centre_CD)
        else:
            self._lists = _ListsByNumpy(cells, capacity, dim, kind)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.cell_K >= 0))

    def replace(self, id_N: Ids, row_ND: Array, cell_N: NDArray[Any]) -> None:
        """Hold these rows under these ids, all distinct, in these cells; former rows leave."""
        id_N = np.ascontiguousarray(id_N)
        held_N = self.cell_K[id_N] >= 0
        if held_N.any():
            self._lists.remove(id_N[held_N], self.cell_K[id_N[held_N]])
        if len(id_N):
            self._lists.add(id_N, np.ascontiguousarray(row_ND), cell_N.astype(np.int64))
        self.cell_K[id_N] = cell_N

    def members(self, cell: int) -> tuple[Ids, Array]:
        """Ids [n] and rows [n, D] of a cell: views, until the next `replace`."""
        return self._lists.members(cell)

    def rows(self, id_N: Ids) -> Array:
        """The rows of these ids, which are held [N, D]."""
        return self._lists.rows(id_N)

    def order(self) -> Ids:
        """All ids, cell by cell as their members lie: rows put back in this order lie the same."""
        cells = range(int(self.cell_K.max(initial=-1)) + 1)
        return np.concatenate([np.empty(0, np.int64), *(self.members(cell)[0] for cell in cells)])


class _ListsByFaiss:
    def __init__(self, centre_CD: Tensor) -> None:
        faiss, (cells, dim) = _faiss(), centre_CD.shape
        self._quantizer = faiss.IndexFlatIP(dim)  # the index only points to it
        self._quantizer.add(_array(centre_CD.to(torch.float32)))
        self._index = faiss.IndexIVFFlat(self._quantizer, dim, cells, faiss.METRIC_INNER_PRODUCT)
        self._index.is_trained = True
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)

    def add(self, id_N: Ids, row_ND: Array, cell_N: Ids) -> None:
        """Append rows under ids that are not held."""
        pointers = (_faiss().swig_ptr(array) for array in (row_ND, id_N, cell_N))
        self._index.add_core(len(id_N), *pointers)

    def remove(self, id_N: Ids, cell_N: Array) -> None:
        """Take out ids, which are held."""
        del cell_N
        self._index.remove_ids(_faiss().IDSelectorArray(id_N))

    def members(self, cell: int) -> tuple[Ids, Array]:
        faiss, lists, dim = _faiss(), self._index.invlists, self._index.d
        count = lists.list_size(cell)
        if count == 0:
            return np.empty(0, np.int64), np.empty((0, dim), np.float32)
        code = faiss.rev_swig_ptr(lists.get_codes(cell), count * self._index.code_size)
        id_n = faiss.rev_swig_ptr(lists.get_ids(cell), count)
        return id_n, code.view(np.float32).reshape(count, dim)

    def rows(self, id_N: Ids) -> Array:
        return np.asarray(self._index.reconstruct_batch(id_N))


class _ListsByNumpy:
    def __init__(self, cells: int, capacity: int, dim: int, kind: np.dtype[Any]) -> None:
        self._row_KD = np.empty((capacity, dim), kind)
        self._ids = [np.empty(0, np.int64)] * cells

    def add(self, id_N: Ids, row_ND: Array, cell_N: Ids) -> None:
        """Append rows under ids that are not held."""
        self._row_KD[id_N] = row_ND
        for cell in np.unique(cell_N):
            self._ids[cell] = np.concatenate([self._ids[cell], id_N[cell_N == cell]])

    def remove(self, id_N: Ids, cell_N: Array) -> None:
        """Take out ids, which are held in these cells."""
        stays_K = np.ones(len(self._row_KD), bool)
        stays_K[id_N] = False
        for cell in np.unique(cell_N):
            self._ids[cell] = self._ids[cell][stays_K[self._ids[cell]]]

    def members(self, cell: int) -> tuple[Ids, Array]:
        return self._ids[cell], self._row_KD[self._ids[cell]]

    def rows(self, id_N: Ids) -> Array:
        return np.asarray(self._row_KD[id_N])


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


@functools.cache
def _faiss() -> Any:
    return importlib.import_module("faiss")  # its types lack half of the names


def _faiss_takes(row_KD: Tensor) -> bool:
    """Whether faiss can search these rows where they lie, on the CPU."""
    return HAVE_FAISS and row_KD.dtype == torch.float32 and row_KD.device.type == "cpu"


@functools.cache
def _gpu_resources() -> Any:
    """Scratch memory and streams of faiss, one set a process; None in a faiss without GPU code."""
    if not HAVE_FAISS or not hasattr(_faiss(), "StandardGpuResources"):
        return None
    resources = _faiss().StandardGpuResources()
    resources.setTempMemory(GPU_SCRATCH)
    return resources


def _array(row_ND: Tensor) -> Array:
    return np.ascontiguousarray(row_ND.detach().numpy())
