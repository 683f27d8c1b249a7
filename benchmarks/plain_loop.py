"""The learner's processor time per image, against ten lines of plain torch: the same network, views
and batches on one thread.

`python -m benchmarks plain_loop`. The learner is that of `deploy/configs/laptop.yaml`, with its
observers. The plain loop is MoCo with a queue as large as the memory. The learner also encodes each
newcomer once without augmentation, so a second plain loop does the same.

Shapes: B batch, C channels, H height, W width, D embedding, K slots.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, interpolate, normalize

from benchmarks import full_learner
from benchmarks.full_learner import Repeated
from stream_ssl.batch import START
from stream_ssl.config import build
from stream_ssl.learning.views import Views

CONFIG = Path(__file__).parent.parent / "deploy/configs/laptop.yaml"
WARM_UP = 3  # steps before the first measurement, and of the learner besides until it is full
ROUNDS, ROUND = 5, 3  # alternating rounds, and steps per round
MOST = 1.1


def scenes(settings: Any, held: int = 32) -> Repeated:
    """Return a stream of different pictures, which are smooth like photographs."""
    shape, draw = build.image_shape(settings), torch.Generator().manual_seed(0)
    batch = settings.batches.batch_size
    small = torch.rand(held * batch, shape[0], 8, 8, generator=draw)
    large = interpolate(small, size=shape[1:], mode="bicubic").clamp(0, 1)
    grain = torch.randint(0, 16, large.shape, dtype=torch.uint8, generator=draw)
    images_NBCHW = ((large * 239).byte() + grain).numpy().reshape(held, batch, *shape)
    return Repeated(images_NBCHW, producers=2)


def learner_steps(settings: Any) -> Iterator[None]:
    """Make the learner's updates, with its observers."""
    learner = build.learner(settings, scenes(settings), START)
    for record in full_learner.steps(learner, settings):
        if record.skipped is None:
            yield None


def plain_steps(settings: Any, encodes_newcomers: bool) -> Iterator[None]:
    """Make the steps of a plain loop with the network, the views and the batches of the learner."""
    stream, method = scenes(settings), build.method(settings)
    views = build.views(settings)
    assert isinstance(views, Views)
    net = torch.nn.Sequential(method.encoder, method.projector)
    slow = copy.deepcopy(net).requires_grad_(False)
    queue_KD = normalize(torch.randn(settings.memory.capacity, method.dim))
    adam = torch.optim.Adam(net.parameters(), lr=0.001)
    while True:
        images_BCHW = torch.from_numpy(stream.next(0.0).images_BCHW)
        z_BD = normalize(net(views(images_BCHW)))
        with torch.no_grad():
            key_BD = normalize(slow(views(images_BCHW)))
            if encodes_newcomers:
                normalize(slow(views.plain(images_BCHW)))
        logit_BN = torch.cat([(z_BD * key_BD).sum(1, keepdim=True), z_BD @ queue_KD.T], 1) / 0.2
        loss = cross_entropy(logit_BN, torch.zeros(len(z_BD), dtype=torch.int64))
        adam.zero_grad()
        loss.backward()
        adam.step()
        torch._foreach_lerp_(list(slow.parameters()), list(net.parameters()), 0.01)
        queue_KD = torch.cat([key_BD, queue_KD])[: len(queue_KD)]
        yield None


def run() -> list[dict[str, Any]]:
    """Return rows with the processor time of an image, and the learner's ratio to each loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = [str(CONFIG), "--run", folder, "--learner.threads", "1"]
            return _rows(full_learner.settings_of(given))
    finally:
        torch.set_num_threads(threads)


def _rows(settings: Any) -> list[dict[str, Any]]:
    loops: dict[str, Iterator[None]] = {
        "learner": learner_steps(settings),
        "plain loop": plain_steps(settings, encodes_newcomers=False),
        "plain loop that encodes newcomers, too": plain_steps(settings, encodes_newcomers=True),
    }
    full = -(-settings.memory.capacity // settings.batches.batch_size)
    for name, steps in loops.items():
        for _ in range(WARM_UP + full * (name == "learner")):
            next(steps)
    spent: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, steps in loops.items():
            started = time.process_time()
            for _ in range(ROUND):
                next(steps)
            seconds = (time.process_time() - started) / ROUND / settings.batches.batch_size
            spent[name].append(1e3 * seconds)
    rows: list[dict[str, Any]] = []
    for name, each in spent.items():
        ratios = [ours / other for ours, other in zip(spent["learner"], each, strict=True)]
        row = {"what": f"ms of processor time per image, {name}", "value": statistics.median(each)}
        if name != "learner":
            ratio = statistics.median(ratios)
            row |= {"learner / this": ratio}
        if name.startswith("plain loop that"):
            row |= {"target": f"<= {MOST}", "met": ratio <= MOST}
        rows.append(row)
    return rows
