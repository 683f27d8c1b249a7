"""A queue beside the working memory."""

from __future__ import annotations

import pytest
import torch
from observe_records import step
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Descriptor, Embedding, Features, Thumbnail, Weighted
from stream_ssl.memory.eviction import MostDuplicated, Oldest
from stream_ssl.observe.shadow import Shadow, StepDescriptor


def test_a_shadow_queue_keeps_the_newest_samples() -> None:
    shadow = Shadow("queue", WorkingMemory(capacity=6, dim=3, eviction=Oldest()))
    for number in range(4):
        admission = shadow.consume(
            step(
                ids_B=torch.arange(4) + 4 * number,
                labels_B=torch.full((4,), number),
                hashes_B=torch.arange(4) + 100 * number,
            )
        )
        assert admission is not None
        assert admission.inserted == 4
    assert sorted(shadow.memory.ids.tolist()) == [10, 11, 12, 13, 14, 15]
    assert sorted(shadow.memory.labels.tolist()) == [2, 2, 3, 3, 3, 3]
    assert sorted(shadow.memory.hashes.tolist()) == [202, 203, 300, 301, 302, 303]
    assert admission.evicted.tolist() == [6, 7, 8, 9]


def test_a_shadow_skips_steps_that_the_working_memory_did_not_get() -> None:
    shadow = Shadow("queue", WorkingMemory(capacity=6, dim=3, eviction=Oldest()))
    assert shadow.consume(step(admission=None, replay=True)) is None
    assert shadow.consume(step(admission=None, keys_BD=torch.full((4, 3), torch.nan))) is None
    assert len(shadow.memory) == 0


class Counted(Thumbnail):
    """A descriptor that counts its calls."""

    calls = 0

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        self.calls += 1
        return super().__call__(z_BD, image_BCHW)


@pytest.mark.parametrize(
    "descriptor",
    [
        Counted(side=2),
        Weighted([Embedding(), Thumbnail(side=2)]),
        Features(dims=2),
        Weighted([Embedding(), Features(dims=2)]),
    ],
    ids=repr,
)
def test_a_shadow_counts_duplicates_on_the_descriptors_of_the_working_memory(
    descriptor: Descriptor,
) -> None:
    shape, draw = (1, 4, 4), torch.Generator().manual_seed(0)
    working = WorkingMemory(6, 3, MostDuplicated(), image_shape=shape, descriptor=descriptor)
    shown = StepDescriptor(descriptor, shape)
    same = Shadow("same", WorkingMemory(6, 3, MostDuplicated(), descriptor=shown))
    queue = Shadow("queue", WorkingMemory(6, 3, Oldest(), descriptor=shown))
    for number in range(5):
        keys_BD = torch.nn.functional.normalize(torch.randn(4, 3, generator=draw), dim=1)
        ids_B = torch.arange(4) + 4 * number
        image_BCHW = torch.randint(0, 256, (4, *shape), generator=draw).to(torch.uint8)
        seen_BF = torch.randn(4, 5, generator=draw) if descriptor.needs_features else None
        admission = working.add(ids_B, keys_BD, image_BCHW, features=seen_BF)
        came = {"ids_B": ids_B, "keys_BD": keys_BD, "images_BCHW": image_BCHW}
        record = step(admission=admission, features_BF=seen_BF, **came)
        for shadow in (same, queue):
            found = shadow.consume(record)
            assert shadow is queue or torch.equal(found.evicted, admission.evicted)
    assert torch.equal(same.memory.ids, working.ids)
    assert torch.equal(same.memory.descriptors, working.descriptors)
    assert torch.equal(same.memory.counts(), working.counts())
    assert same.memory.images is None
    assert queue.memory.descriptors.shape == working.descriptors.shape
    if isinstance(descriptor, Counted):
        assert descriptor.calls == 2 * 5  # for the working memory, and once for both shadows


def test_a_rank_without_samples_adds_nothing_to_its_shadow() -> None:
    shown = StepDescriptor(Features(dims=2), (1, 4, 4))
    shadow = Shadow("queue", WorkingMemory(6, 3, Oldest(), descriptor=shown))
    none, images_0CHW = torch.empty(0, dtype=torch.int64), torch.empty(0, 1, 4, 4)
    none_0D = torch.empty(0, 3)
    columns = {"ids_B": none, "labels_B": none, "hashes_B": none}
    admission = shadow.consume(step(keys_BD=none_0D, images_BCHW=images_0CHW, **columns))
    assert admission is not None
    assert admission.inserted == 0


def test_a_record_without_images_is_refused() -> None:
    shown = StepDescriptor(Thumbnail(side=2), (1, 4, 4))
    shadow = Shadow("queue", WorkingMemory(6, 3, Oldest(), descriptor=shown))
    with pytest.raises(ValueError, match=r"Thumbnail\(side=2\) describes images"):
        shadow.consume(step())
