"""All that is asked of faiss, and the only file that imports it: pip install faiss-cpu.

Every function has a twin in torch of the same signature, beside where it is used. Arrays go in by
pointer. `faiss.contrib.torch_utils` would take tensors, but it patches every index class of the
process on import, so it is left alone.

Shapes: B queries, C cells, D embedding, K rows searched, k neighbours, N rows clustered, R pairs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

HAVE_FAISS = importlib.util.find_spec("faiss") is not None
"""Looked for without importing it."""

GPU_NEIGHBOURS = 2048
"""Most neighbours that faiss selects on a GPU."""


@functools.cache
def gpu_resources() -> Any:
    """Scratch memory and streams of faiss, one set a process; None in a faiss without GPU code."""
    if not HAVE_FAISS:
        return None
    import faiss

    return faiss.StandardGpuResources() if hasattr(faiss, "StandardGpuResources") else None


def serves(rows: Tensor, k: int = 1) -> bool:
    """Whether faiss can search these rows where they lie: float32, and on a GPU a faiss for it."""
    if not HAVE_FAISS or rows.dtype != torch.float32:
        return False
    if rows.device.type == "cpu":
        return True
    return rows.device.type == "cuda" and k <= GPU_NEIGHBOURS and gpu_resources() is not None


def nearest_by_faiss(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`nearest` by brute force in faiss, on the device of the rows; float32 only."""
    import faiss

    if row_KD.device.type != "cpu":
        return _nearest_on_gpu(z_BD, row_KD, min(k, len(row_KD)))
    query, rows = z_BD.detach().contiguous().numpy(), row_KD.detach().contiguous().numpy()
    metric = faiss.METRIC_INNER_PRODUCT
    cosine, row = faiss.knn(query, rows, min(k, len(rows)), metric=metric)
    return torch.from_numpy(cosine), torch.from_numpy(row)


def _nearest_on_gpu(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `faiss.knn_gpu` does, on tensors in place: it takes numpy arrays alone, and copies."""
    faiss: Any = importlib.import_module("faiss")  # its types lack these names
    device = row_KD.device
    query_BD, row_KD = z_BD.detach().to(device).contiguous(), row_KD.detach().contiguous()
    cosine_Bk = torch.empty(len(query_BD), k, dtype=torch.float32, device=device)
    row_Bk = torch.empty(len(query_BD), k, dtype=torch.int64, device=device)
    if len(query_BD) == 0:
        return cosine_Bk, row_Bk
    ask = faiss.GpuDistanceParams()
    ask.metric, ask.k, ask.dims = faiss.METRIC_INNER_PRODUCT, k, query_BD.shape[1]
    ask.vectors, ask.numVectors = faiss.cast_integer_to_void_ptr(row_KD.data_ptr()), len(row_KD)
    ask.queries, ask.numQueries = faiss.cast_integer_to_void_ptr(query_BD.data_ptr()), len(query_BD)
    ask.vectorType = ask.queryType = faiss.DistanceDataType_F32
    ask.vectorsRowMajor = ask.queriesRowMajor = True
    ask.outDistances = faiss.cast_integer_to_float_ptr(cosine_Bk.data_ptr())
    ask.outIndices = faiss.cast_integer_to_void_ptr(row_Bk.data_ptr())
    ask.outIndicesType = faiss.IndicesDataType_I64
    resources, number = gpu_resources(), torch.cuda.current_device()
    ask.device = number if device.index is None else device.index
    with torch.cuda.device(ask.device):
        # On torch's own stream, so that the search waits for whoever writes the rows.
        stream = torch.cuda.current_stream(ask.device).cuda_stream
        resources.setDefaultStream(ask.device, faiss.cast_integer_to_cudastream_t(stream))
        faiss.bfKnn(resources, ask)
    return cosine_Bk, row_Bk


def within_by_faiss(z_BD: Tensor, row_KD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
    """`within` by brute force in faiss; float32 on the CPU only."""
    import faiss

    query, rows = z_BD.detach().contiguous().numpy(), row_KD.detach().contiguous().numpy()
    found = faiss.RangeSearchResult(len(query))
    # faiss keeps what is strictly above the radius.
    radius = float(np.nextafter(np.float32(cosine), np.float32(-np.inf)))
    pointer = faiss.swig_ptr
    faiss.range_search_inner_product(
        pointer(query), pointer(rows), query.shape[1], len(query), len(rows), radius, found
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


def centres_by_faiss(z_ND: Tensor, cells: int, seed: int, rounds: int) -> Tensor:
    """Unit centres [C, D] of spherical k-means in faiss; float32 on the CPU only."""
    import faiss

    means: Any = faiss.Kmeans(
        z_ND.shape[1],
        cells,
        niter=rounds,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, len(z_ND)),
    )
    means.train(z_ND.detach().contiguous().numpy())
    return torch.nn.functional.normalize(torch.from_numpy(means.centroids.copy()), dim=1)


class CellsByFaiss:
    """Rows by id in cells, searched a few cells at a time: an IVF index. Holds its own copies.

    Float32 on the CPU only; twin: `CellsByTorch`.

    Args:
        centre_CD: unit centres of the cells.
    """

    def __init__(self, centre_CD: Tensor) -> None:
        faiss: Any = importlib.import_module("faiss")
        cells, dim = centre_CD.shape
        self._quantizer = faiss.IndexFlatIP(dim)  # the index only points to it
        self._index: Any = faiss.IndexIVFFlat(
            self._quantizer, dim, cells, faiss.METRIC_INNER_PRODUCT
        )
        self._quantizer.add(_array(centre_CD))
        self._index.is_trained = True
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)  # removal without a scan

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, ids_N: Tensor, z_ND: Tensor) -> None:
        """Take rows under ids that are not held."""
        if len(ids_N):
            self._index.add_with_ids(_array(z_ND), ids_N.numpy())

    def remove(self, ids_N: Tensor) -> None:
        """Give up rows by their ids, which are held."""
        import faiss

        if len(ids_N):
            self._index.remove_ids(faiss.IDSelectorArray(ids_N.numpy()))

    def search(self, z_BD: Tensor, k: int, probe: int) -> tuple[Tensor, Tensor]:
        """Cosine [B, k] and id [B, k] of the nearest in `probe` cells; -inf and -1 where fewer."""
        self._index.nprobe = probe
        cosine_Bk, id_Bk = self._index.search(_array(z_BD), k)
        cosine_Bk[id_Bk < 0] = -np.inf
        return torch.from_numpy(cosine_Bk), torch.from_numpy(id_Bk)

    def within(self, z_BD: Tensor, cosine: float, probe: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, id and cosine of all pairs found in `probe` cells, by query and then by id."""
        self._index.nprobe = probe
        radius = float(np.nextafter(np.float32(cosine), np.float32(-np.inf)))
        limit, cosine_R, id_R = self._index.range_search(_array(z_BD), radius)
        query_R = np.repeat(np.arange(len(z_BD)), np.diff(limit.astype(np.int64)))
        order = np.lexsort((id_R, query_R))
        return (
            torch.from_numpy(query_R[order]),
            torch.from_numpy(id_R[order]),
            torch.from_numpy(cosine_R[order]),
        )


def _array(z_ND: Tensor) -> Any:
    return z_ND.detach().contiguous().numpy()
