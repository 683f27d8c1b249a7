"""Speed and accuracy of the search for near-duplicates, compared with other methods.

python -m benchmarks duplicates                      # speed, on one core
python -m benchmarks.duplicates --cifar FOLDER --fashion FOLDER --picture FILE.svg   # accuracy

The second command stores 32,768 pictures. It then offers 2,000 other pictures, which should be
admitted, and modified copies of 500 stored pictures, which should be found. FOLDER contains the
binary version of CIFAR-10, or Fashion-MNIST in torchvision's layout. PDQ is included if `pdqhash`
is installed, and EfficientNet-lite0 if its weights are (the extra `pretrained`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, normalize

from stream_ssl.encoder.efficientnet_lite import PACKAGE, EfficientNetLite0
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Frozen
from stream_ssl.memory.eviction import Random
from stream_ssl.memory.near_duplicates import (
    APART,
    LIMIT,
    NEIGHBOURS,
    NearDuplicates,
    look_closely,
)
from stream_ssl.memory.sketch_distance import ALIKE
from stream_ssl.memory.sketches import key, sketch, sketch_and_frame, sketch_inside
from stream_ssl.memory.slot_index import nearest_rows
from stream_ssl.producers.sources import CifarBinary, IdxDataset, Source

SIZES = {65_536: 20_000, 1 << 20: 1_500}  # slots: target in samples per second
BATCH, BATCHES = 512, 12
HELD, STRANGERS, COPIES = 32_768, 2_000, 500

Pictures = NDArray[np.uint8]  # [N, 32, 32, 3]


def run() -> list[dict[str, Any]]:
    """Measure how many samples per second are compared with all slots.

    One sample in four is a copy of a stored picture.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    try:
        return [measured(slots, target) for slots, target in SIZES.items()]
    finally:
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)


def measured(slots: int, target: int) -> dict[str, Any]:
    """Return the row of a memory with this number of slots."""
    generator = torch.Generator().manual_seed(0)
    memory = WorkingMemory(slots, 2, Random(), (3, 32, 32))
    for start in range(0, slots, 4096):
        z_BD = normalize(torch.randn(4096, 2, generator=generator), dim=1)
        memory.add(torch.arange(start, start + 4096), z_BD, drawn(4096, generator))
    door, spent, found = NearDuplicates(memory), [], 0
    for turn in range(BATCHES + 1):
        batch = drawn(BATCH, generator)
        copied = torch.randperm(slots, generator=generator)[: BATCH // 4]
        batch[::4] = memory.images_of(copied)
        ids_B = slots + turn * BATCH + torch.arange(BATCH)
        start_s = time.perf_counter()
        admitted_B = torch.from_numpy(door.find(batch, batch[:0], "refuse", ids_B).admitted_B)
        spent += [time.perf_counter() - start_s] if turn else []  # the first turn reads all slots
        found += BATCH - int(admitted_B.sum())
        new_BCHW = batch[admitted_B]
        z_BD = normalize(torch.randn(len(new_BCHW), 2, generator=generator), dim=1)
        memory.add(ids_B[admitted_B], z_BD, new_BCHW)
    a_second = BATCH / float(np.median(spent))
    return {
        "slots": slots,
        "samples/s": a_second,
        "copies found": found / ((BATCHES + 1) * BATCH / 4),
        "target": f">= {target:,} samples/s",
        "met": a_second >= target,
    }


def drawn(count: int, generator: torch.Generator) -> Tensor:
    """Return uint8 pictures [B, 3, 32, 32] with large and small shapes."""
    picture_BCHW = torch.zeros(count, 3, 32, 32)
    for side, strength in ((4, 60.0), (8, 40.0), (16, 20.0), (32, 10.0)):
        layer = torch.randn(count, 3, side, side, generator=generator) * strength
        picture_BCHW += interpolate(layer, size=(32, 32), mode="bilinear")
    return (picture_BCHW + 128).clamp(0, 255).to(torch.uint8)


# Accuracy


def jpeg(picture: Pictures) -> Pictures:
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "JPEG", quality=50)
    return np.asarray(Image.open(data))


def resized(factor: float) -> Callable[[Pictures], Pictures]:
    def change(picture: Pictures) -> Pictures:
        whole, side = len(picture), round(len(picture) * factor)
        image = Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR)
        return np.asarray(image.resize((whole, whole), Image.Resampling.BILINEAR))

    return change


def noised(picture: Pictures) -> Pictures:
    noise = np.random.default_rng(int(picture[0, 0, 0])).normal(0, 10, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def grey(picture: Pictures) -> Pictures:
    return np.asarray(Image.fromarray(picture).convert("L").convert("RGB"))


def brighter(factor: float) -> Callable[[Pictures], Pictures]:
    return lambda picture: np.clip(picture * factor, 0, 255).astype(np.uint8)


def bordered(picture: Pictures) -> Pictures:
    inner = Image.fromarray(picture).resize((28, 28), Image.Resampling.BILINEAR)
    return np.pad(np.asarray(inner), ((2, 2), (2, 2), (0, 0)), constant_values=255)


def cropped(picture: Pictures) -> Pictures:
    inner = Image.fromarray(picture[2:30, 2:30])
    return np.asarray(inner.resize((32, 32), Image.Resampling.BILINEAR))


def captioned(picture: Pictures) -> Pictures:
    changed = picture.copy()
    changed[26:30, 4:28] = np.where(np.arange(24) % 3 == 0, 255, 0)[None, :, None]
    return changed


KINDS: dict[str, Callable[[Pictures], Pictures]] = {
    "JPEG, quality 50": jpeg,
    "resized by 1.5 and back": resized(1.5),
    "resized by 0.75 and back": resized(0.75),
    "20 % darker": brighter(0.8),
    "20 % brighter": brighter(1.2),
    "noise of 10 levels": noised,
    "grey": grey,
    "mirrored": lambda picture: np.ascontiguousarray(picture[:, ::-1]),
    "border": bordered,
    "cropped": cropped,
    "caption": captioned,
}
COMMON = list(KINDS)[:7]
"""Changes that cameras and encoders make."""

Scores = Callable[[Pictures, Pictures], NDArray[np.floating[Any]]]
"""Maps (stored pictures, queries) to one score per query. A lower score means more alike."""


def tensor(picture_BHWC: Pictures) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(picture_BHWC.transpose(0, 3, 1, 2)))


def by_thumbnails(side: int) -> Scores:
    """Compare thumbnails of `side` x `side` pixels, without their mean, by their cosine."""

    def rows(pictures: Pictures) -> Tensor:
        small = adaptive_avg_pool2d(tensor(pictures).float() / 255, side).flatten(1)
        return normalize(small - small.mean(dim=1, keepdim=True) + 1e-3, dim=1)

    return lambda held, queries: nearest_rows(rows(queries), rows(held), 1)[0][:, 0].numpy()


def by_features() -> Scores:
    """Compare features of EfficientNet-lite0, which was trained on ImageNet, by their cosine."""
    descriptor = Frozen(EfficientNetLite0(pretrained=True), mean=(0.498,), std=(0.502,))
    known: list[tuple[Pictures, Tensor]] = []  # cached, because they take minutes

    def rows(pictures: Pictures) -> Tensor:
        images_BCHW = tensor(pictures)
        return descriptor(torch.zeros(len(images_BCHW), 1), images_BCHW)

    def scores(held: Pictures, queries: Pictures) -> NDArray[np.floating[Any]]:
        if not known or known[0][0] is not held:
            known[:] = [(held, rows(held))]
        return nearest_rows(rows(queries), known[0][1], 1)[0][:, 0].numpy()

    return scores


def by_hash(bits: Callable[[Pictures], NDArray[np.uint8]]) -> Scores:
    """Compare packed bits [N, bytes] by the smallest Hamming distance."""

    def scores(held: Pictures, queries: Pictures) -> NDArray[np.floating[Any]]:
        held_bits = bits(held)
        index = faiss.IndexBinaryFlat(8 * held_bits.shape[1])
        index.add(held_bits)
        return index.search(bits(queries), 1)[0][:, 0].astype(float)

    return scores


def perceptual(pictures: Pictures) -> NDArray[np.uint8]:
    """Return the pHash: which of the 8 x 8 lowest frequencies exceed their median."""
    gray = pictures @ np.array([0.299, 0.587, 0.114])
    low = dctn(gray, axes=(1, 2))[:, :8, :8].reshape(len(gray), 64)
    return np.packbits(low > np.median(low, axis=1, keepdims=True), axis=1)


def pdq(pictures: Pictures) -> NDArray[np.uint8]:
    """Return the PDQ hash of pictures enlarged to 128 x 128."""
    module = importlib.import_module("pdqhash")
    larger = (np.asarray(Image.fromarray(one).resize((128, 128))) for one in pictures)
    return np.packbits(np.stack([module.compute(one)[0] for one in larger]), axis=1)


def closely(held: Pictures, queries: Pictures) -> NDArray[np.floating[Any]]:
    """Compare pictures as this project does. Only LIMIT varies along the curve."""
    held_KD = torch.cat([sketch(tensor(part)) for part in np.array_split(held, 64)])
    held_KA = key(held_KD)

    def distances(query_BD: Tensor) -> Tensor:
        square_Bn, row_Bn = nearest_rows(key(query_BD), held_KA, NEIGHBOURS)
        return look_closely(
            query_BD,
            square_Bn,
            row_Bn,
            held_KD.__getitem__,
            all_of_them=False,
            next_B=square_Bn[:, 1],
        )

    query_BD, framed_B = sketch_and_frame(tensor(queries))
    far_Bn = distances(query_BD)
    inside_Fn = distances(sketch_inside(tensor(queries)[framed_B]))
    nearer_F = inside_Fn.amin(dim=1) < far_Bn[framed_B].amin(dim=1)
    far_Bn[framed_B.nonzero()[nearer_F, 0]] = inside_Fn[nearer_F]
    near_B, next_B = far_Bn.sort(dim=1).values[:, :2].unbind(dim=1)
    told_B = (near_B < ALIKE) | (near_B < APART * next_B)
    return near_B.masked_fill(~told_B, 9.0).numpy()


def methods() -> Iterator[tuple[str, Scores]]:
    """Yield the name and the scores of each method whose library is installed."""
    yield "as shipped", closely
    yield "cosine of 8 x 8", by_thumbnails(8)
    yield "cosine of 16 x 16", by_thumbnails(16)
    yield "pHash", by_hash(perceptual)
    if importlib.util.find_spec("pdqhash"):
        yield "PDQ", by_hash(pdq)
    if importlib.util.find_spec(PACKAGE):
        yield "frozen lite0", by_features()


def compared(source: Source) -> Iterator[dict[str, Any]]:
    """Yield a row per method: the copies found at a threshold that drops 1 % of the strangers."""
    pictures = np.stack(list(loaded(source, HELD + STRANGERS)))
    held, strangers = pictures[:HELD], pictures[HELD:]
    own = held[:: HELD // COPIES][:COPIES]
    for name, scores in methods():
        stranger_B = scores(held, strangers)
        at = float(np.quantile(stranger_B, 0.01, method="lower"))
        row: dict[str, Any] = {"method": name, "strangers": stranger_B, "copies": {}}
        if name == "as shipped":
            row["dropped"] = float((stranger_B < LIMIT).mean())
        for kind, change in KINDS.items():
            copy_B = scores(held, np.stack([change(one) for one in own]))
            row["copies"][kind] = copy_B
            row[kind] = float((copy_B < (LIMIT if name == "as shipped" else at)).mean())
        yield row


def loaded(source: Source, count: int) -> Iterator[Pictures]:
    """Yield `count` pictures of a source, as 32 x 32 in colour."""
    for number, (sample, _) in enumerate(source.samples()):
        if number == count:
            return
        picture = np.frombuffer(sample.data, np.uint8).reshape(sample.shape)
        if picture.shape[0] == 28:
            image = Image.fromarray(picture[:, :, 0]).resize((32, 32), Image.Resampling.BILINEAR)
            picture = np.asarray(image.convert("RGB"))
        yield picture


def draw(found: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draw a curve per method: the share of copies found against the share of strangers dropped."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (name, rows) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for row in rows:
            copy_N = np.sort(np.concatenate([row["copies"][kind] for kind in COMMON]))
            stranger_B = np.sort(row["strangers"])
            share = np.searchsorted(stranger_B, copy_N, side="right") / len(stranger_B)
            share = np.maximum(share, 1e-4)
            axes.plot(share, np.arange(1, len(copy_N) + 1) / len(copy_N), label=row["method"])
        axes.set_xscale("log")
        axes.set_xlim(1e-4, 1)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("strangers dropped")
        axes.set_ylabel("copies found")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duplicates", description=__doc__)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--fashion", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    chosen = parser.parse_args()
    sources = {
        "CIFAR-10": CifarBinary(chosen.cifar),
        "Fashion-MNIST": IdxDataset(chosen.fashion),
    }
    found = {name: list(compared(source)) for name, source in sources.items()}
    for name, rows in found.items():
        print(f"{name}, {HELD:,} held, {STRANGERS:,} strangers, {COPIES} copies of each kind")
        for row in rows:
            away = row.get("dropped", 0.01)
            print(f"  {row['method']:20} strangers {away:.2%}", end="")
            print("".join(f"; {kind} {row[kind]:.1%}" for kind in KINDS))
    draw(found, chosen.picture)


if __name__ == "__main__":
    main()
