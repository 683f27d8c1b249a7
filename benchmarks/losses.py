"""Speed and memory use of the losses, compared with plain and published implementations."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import losses_plain as plain_losses
from benchmarks.eviction import timed
from benchmarks.ingest import peak_rss
from stream_ssl.losses import (
    Debiased,
    Decoupled,
    HardNegative,
    InfoNCE,
    Loss,
    SelfLabeling,
    SupervisedContrastive,
)

BATCH, DIM, SLOTS, MILLION = 256, 128, 65_536, 1 << 20
MOST_TIME, MOST_MEMORY, MOST_MB = 0.5, 0.1, 200
T = plain_losses.T
HOW = "pip install 'stream-ssl[bench]'"


@dataclass(frozen=True, slots=True)
class LossRow:
    """One measured line: forward and backward of a batch of 256 in 128 dimensions.

    Attributes:
        ms: median milliseconds of ours.
        other_ms: median milliseconds of the other, which takes turns with ours.
        time_ratio: median over pairs of ours / the other's wall-clock time.
        cpu_ratio: median over pairs of ours / the other's processor time, which other programs
            affect less.
        extra_mb: largest growth of the process with ours, in MB.
        other_extra_mb: largest growth of the process with the other, in MB.
    """

    work: str
    negatives: int
    ms: float | None = None
    other_ms: float | None = None
    time_ratio: float | None = None
    cpu_ratio: float | None = None
    extra_mb: float | None = None
    other_extra_mb: float | None = None
    memory_ratio: float | None = None
    difference: float | None = None
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """Unit rows of ten classes, with a sparse mask as a working memory makes it."""

    z_BD: Tensor
    positive_BD: Tensor
    negative_ND: Tensor
    mask_BN: Tensor | None
    same_BN: Tensor


def inputs(count: int, masked: bool) -> Inputs:
    """Return seeded inputs with `count` negatives, with a mask if `masked`."""
    generator = torch.Generator().manual_seed(0)

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, DIM, generator=generator), dim=1)

    z_BD = unit(BATCH)
    positive_BD = F.normalize(z_BD + 0.5 * unit(BATCH), dim=1)
    class_B = torch.randint(10, (BATCH, 1), generator=generator)
    class_N = torch.randint(10, (count,), generator=generator)
    mask_BN = torch.rand(BATCH, count, generator=generator) < 2 / count if masked else None
    return Inputs(z_BD.requires_grad_(), positive_BD, unit(count), mask_BN, class_B == class_N)


def step(loss: Loss, given: Inputs) -> float:
    """Run forward and backward of our loss; return the loss."""
    given.z_BD.grad = None
    same_BN = given.same_BN if loss.needs_labels else None
    out = loss(
        given.z_BD,
        given.positive_BD.unsqueeze(1),
        given.negative_ND,
        given.mask_BN,
        same_BN=same_BN,
    )
    out.loss.backward()
    return float(out.loss.detach())


def plain_step(plain: plain_losses.Plain, given: Inputs) -> float:
    """Run forward and backward of the plain loss; return the loss."""
    given.z_BD.grad = None
    value = plain(given.z_BD, given.positive_BD, given.negative_ND, given.mask_BN, given.same_BN)
    value.backward()
    return float(value.detach())


def grown(work: Callable[[], object]) -> float:
    """Return by how many MB the process grows at most while it works."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # reused memory must count as growth
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss / 2**20
    work()
    return peak_rss() / 2**20 - before


def spent(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock seconds and the processor seconds of the work."""
    start = time.process_time()
    return timed(work), time.process_time() - start


def compare(
    work: str,
    count: int,
    ours: Callable[[], float],
    other: Callable[[], float],
    repeats: int = 9,
    targets: bool = False,
) -> LossRow:
    """Measure both in turn, so that other load on the machine affects both equally."""
    memory = grown(ours), grown(other)
    difference = abs(ours() - other())
    pairs = [(spent(ours), spent(other)) for _ in range(repeats)]
    ratio, cpu = (statistics.median(own[i] / others[i] for own, others in pairs) for i in (0, 1))
    share = memory[0] / max(memory[1], 1e-9)
    return LossRow(
        work=work,
        negatives=count,
        ms=1000 * statistics.median(own[0] for own, _ in pairs),
        other_ms=1000 * statistics.median(others[0] for _, others in pairs),
        time_ratio=ratio,
        cpu_ratio=cpu,
        extra_mb=memory[0],
        other_extra_mb=memory[1],
        memory_ratio=share,
        difference=difference,
        target=f"<= {MOST_TIME} x time, <= {MOST_MEMORY} x memory" if targets else "",
        met=ratio <= MOST_TIME and share <= MOST_MEMORY if targets else None,
    )


PAIRS: dict[str, tuple[Callable[[], Loss], plain_losses.Plain]] = {
    "InfoNCE": (lambda: InfoNCE(T), plain_losses.infonce),
    "Decoupled": (lambda: Decoupled(T), plain_losses.decoupled),
    "Debiased": (lambda: Debiased(T, plain_losses.TAU), plain_losses.debiased),
    "HardNegative": (
        lambda: HardNegative(T, plain_losses.TAU, plain_losses.BETA),
        plain_losses.hard_negative,
    ),
    "SelfLabeling": (
        lambda: SelfLabeling(T, plain_losses.ALPHA, plain_losses.ALPHA, plain_losses.SHARP, rise=0),
        plain_losses.self_labeling,
    ),
    "SupervisedContrastive": (lambda: SupervisedContrastive(T), plain_losses.supervised),
}


def against_plain(name: str, masked: bool) -> LossRow:
    """Compare a loss with its plain form at SLOTS negatives."""
    build, plain = PAIRS[name]
    loss, given = build(), inputs(SLOTS, masked)
    return compare(
        f"{name} against plain logits{', masked' if masked else ''}",
        SLOTS,
        lambda: step(loss, given),
        lambda: plain_step(plain, given),
        targets=True,
    )


def a_million(name: str) -> LossRow:
    """Measure the memory use of a loss with a million negatives."""
    loss, given = PAIRS[name][0](), inputs(MILLION, masked=False)
    extra = grown(lambda: step(loss, given))
    return LossRow(
        work=name,
        negatives=MILLION,
        extra_mb=extra,
        target=f"< {MOST_MB} MB",
        met=extra < MOST_MB,
    )


def against_lightly(count: int) -> LossRow:
    """Compare with lightly, whose loss owns the bank, clones it, and writes each batch into it."""
    work = "InfoNCE against lightly's NTXentLoss with memory bank"
    try:
        from lightly.loss import NTXentLoss
    except ImportError:
        return LossRow(f"{work}: not installed, {HOW}", count)
    given, ours = inputs(count, masked=False), InfoNCE(T)
    other = NTXentLoss(temperature=T, memory_bank_size=(count, DIM))

    other(given.z_BD.detach(), given.positive_BD)  # creates its bank
    bank_KD = other.memory_bank.bank
    bank_KD.copy_(given.negative_ND)

    def their_step() -> float:
        given.z_BD.grad = None
        value = other(given.z_BD, given.positive_BD)
        value.backward()
        bank_KD[:BATCH] = given.negative_ND[:BATCH]  # else it fills with one batch
        other.memory_bank.bank_ptr.zero_()
        return float(value.detach())

    return compare(work, count, lambda: step(ours, given), their_step)


def against_metric_learning(name: str, count: int) -> LossRow:
    """Compare with pytorch-metric-learning, whose memory is a queue of embeddings and labels.

    Its NTXentLoss holds all pairs of pairs, and its SupConLoss holds the logits.
    """
    work = f"InfoNCE against pytorch-metric-learning's CrossBatchMemory of {name}"
    try:
        from pytorch_metric_learning import losses as theirs
    except ImportError:
        return LossRow(f"{work}: not installed, {HOW}", count)
    given, ours = inputs(count, masked=False), InfoNCE(T)
    # Its queue also takes one key per anchor from the batch; the rest are negatives.
    memory = theirs.CrossBatchMemory(getattr(theirs, name)(temperature=T), DIM, count + BATCH)
    label_B = torch.arange(BATCH)
    key = torch.cat([torch.zeros(BATCH), torch.ones(BATCH)]).bool()
    memory.add_to_memory(given.negative_ND, torch.arange(count) + BATCH, count)

    def their_step() -> float:
        given.z_BD.grad = None
        memory.queue_idx = count
        both_VD = torch.cat([given.z_BD, given.positive_BD])
        value = memory(both_VD, torch.cat([label_B, label_B]), enqueue_mask=key)
        value.backward()
        return float(value.detach())

    # The other keys of the batch are negatives in its loss, so they are negatives in ours.
    every_ND = torch.cat([given.positive_BD, given.negative_ND])
    own_BN = torch.zeros(BATCH, count + BATCH, dtype=torch.bool)
    own_BN[:, :BATCH].fill_diagonal_(True)
    same = Inputs(given.z_BD, given.positive_BD, every_ND, own_BN, own_BN)
    return compare(work, count + BATCH, lambda: step(ours, same), their_step, repeats=3)


def run() -> Iterator[LossRow]:
    """Yield the lines one by one."""
    small = inputs(1024, masked=True)
    for build, plain in PAIRS.values():  # warm up: libraries allocate some memory once
        step(build(), small)
        plain_step(plain, small)
    for name in ("InfoNCE", "Debiased", "SelfLabeling"):  # first, while the process is small
        yield a_million(name)
    yield against_plain("InfoNCE", masked=False)
    for name in PAIRS:
        yield against_plain(name, masked=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the other libraries
        yield against_lightly(SLOTS)
        yield against_metric_learning("SupConLoss", SLOTS)
        yield against_metric_learning("NTXentLoss", 1024)
