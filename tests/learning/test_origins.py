"""Tests of the origins of the memory's samples, against a dict of all samples so far."""

from dataclasses import replace

import pytest
import torch
from learning_world import build, steps
from table import table
from torch.nn.functional import normalize

from stream_ssl.batch import Batch, Origin
from stream_ssl.learning.origins import Origins, packed, unpacked
from stream_ssl.memory import WorkingMemory


def test_origins_follow_the_memory_and_parts_of_several_ranks_join() -> None:
    generator = torch.Generator().manual_seed(0)
    memories, follows = [WorkingMemory(20, 8) for _ in range(2)], [Origins(), Origins()]
    known: dict[int, Origin | None] = {}
    for turn in range(30):
        for rank, (memory, origins) in enumerate(zip(memories, follows, strict=True)):
            ids = [1000 * rank + 8 * turn + b for b in range(8)]
            if turn > 5 and (again := 1000 * rank + turn % 5) not in memory.ids.tolist():
                ids[-1] = again
            came = [None if n % 7 == 0 else Origin("robot", "left", f"é{n}", n / 3) for n in ids]
            known |= dict(zip(ids, came, strict=True))
            z_BD = normalize(torch.randn(8, 8, generator=generator), dim=1)
            admission = memory.add(torch.tensor(ids), z_BD)
            gone = origins.follow(ids, came, admission)
            assert gone == [known[number] for number in admission.evicted.tolist()]
            held = memory.ids.tolist()
            assert origins.of(held) == [known[number] for number in held]
            assert len(unpacked(origins.state()["rows"])) <= len(held)
    rows_L = torch.cat([origins.state()["rows"] for origins in follows])
    held = [*memories[0].ids.tolist()[:10], *memories[1].ids.tolist()[10:]]
    joined = Origins()
    joined.load({"rows": rows_L}, held)
    assert joined.of(held) == [known[number] for number in held]
    assert joined.of([*memories[0].ids.tolist()[10:], 10**9]) == [None] * 11
    joined.load({}, held)  # a checkpoint of a release without origins
    assert joined.of(held) == [None] * 20


@table(
    "row",
    [
        7,
        [7],
        ["7", "robot", "left", "a", 0.0],
        [7, "robot", "left", "a", "noon"],
        [7, None, "left", "a", 0.0],
        [7, "robot", "left", "a", 0.0, 5],
        [7, "robot", "left", "a", 0.0, "name", "more"],
    ],
    ids=str,
)
def test_damaged_origins_are_refused(row: object) -> None:
    origins = Origins()
    origins.load({"rows": packed([[7, "robot", "left", "a", 1]])}, [7])
    with pytest.raises(ValueError, match=r"origins of the samples are damaged: .* no origin; give"):
        origins.load({"rows": packed([row])}, [7])  # type: ignore[list-item]
    assert origins.of([7]) == [Origin("robot", "left", "a", 1)]
    for rows in (b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        state = {"rows": torch.frombuffer(bytearray(rows), dtype=torch.uint8)}
        with pytest.raises(ValueError, match="origins of the samples are damaged"):
            origins.load(state, [7])


def test_the_memory_stores_the_producer_of_each_sample() -> None:
    learner = build()
    steps(learner, 2)
    assert learner.memory.producers == ["robot"] * len(learner.memory)
    nobody = Batch(torch.arange(2), torch.ones(2), torch.ones(2), torch.zeros(2, 1, 8, 8))
    assert nobody.producers_B is None
    sent = replace(nobody, origins_B=[None, Origin("yard", "left", "1", 0.0)])
    assert sent.producers_B == [None, "yard"]
