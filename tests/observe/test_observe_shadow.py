"""A queue beside the working memory."""

from __future__ import annotations

import torch
from observe_records import step

from memory import WorkingMemory
from memory.eviction import Oldest
from stream_ssl.observe.shadow import Shadow


def test_a_shadow_queue_keeps_the_newest() -> None:
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


def test_it_is_given_what_the_working_memory_was_given() -> None:
    shadow = Shadow("queue", WorkingMemory(capacity=6, dim=3, eviction=Oldest()))
    assert shadow.consume(step(admission=None, replay=True)) is None
    assert shadow.consume(step(admission=None, keys_BD=torch.full((4, 3), torch.nan))) is None
    assert len(shadow.memory) == 0
