"""Reading labelled sources, encoding them once, and the balance of the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from table import table

from stream_ssl.evaluation.encoding import Encoded, encode
from stream_ssl.evaluation.labelled import UNLABELLED, Division, Reader, balanced
from stream_ssl.evaluation.measures import (
    MOST_CONFUSED,
    RETRIEVED,
    check,
    measure,
    task_accuracies,
)
from stream_ssl.feed.decode import Decoder
from stream_ssl.producers.sources import Synthetic
from stream_ssl.wire.sample import Sample


class Held:
    """A shuffled source with given counts of images. The first two pixels tell the number."""

    name = "held"

    def __init__(self, counts: dict[int, int]) -> None:
        self.label_N = np.repeat(list(counts), list(counts.values()))

    def __len__(self) -> int:
        return len(self.label_N)

    def samples(self, position: Any = None) -> Iterator[tuple[Sample, Any]]:
        for number in np.random.default_rng(0).permutation(len(self.label_N)).tolist():
            image_HWC = np.full((6, 6, 1), number % 7, np.uint8)
            image_HWC[0, :2, 0] = divmod(number, 256)
            label = int(self.label_N[number])
            yield Sample.from_array(image_HWC, f"{number}", label=label), number


class Numbers:
    """Features: the image's number, and a 1; a view adds noise."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(image_BCHW))
        assert image_BCHW.shape[1:] == (1, 6, 6)
        flat = image_BCHW.flatten(1).double()
        return torch.stack([256 * flat[:, 0] + flat[:, 1], torch.ones(len(flat))], dim=1)

    def view(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        return self(image_BCHW) + torch.randn(len(image_BCHW), 2)


class PartlyLabelled(Held):
    """The samples of class 9 carry no label."""

    def samples(self, position: Any = None) -> Iterator[tuple[Sample, Any]]:
        for sample, number in super().samples():
            yield replace(sample, label=None if sample.label == 9 else sample.label), number


def test_samples_without_a_label_are_left_out_and_counted() -> None:
    reader = Reader(PartlyLabelled({0: 30, 1: 20, 9: 2000}), Decoder(6, 1), Division(0.5))
    labels = [label for batch in reader for label in batch.label_B.tolist()]
    assert Counter(labels) == {0: 30, 1: 20}
    assert reader.refused == {"no label": 2000}
    assert reader.seen == 2050


@pytest.mark.parametrize(("samples", "read"), [(7, 7), (5000, UNLABELLED)])
def test_a_source_without_labels_is_refused_soon(samples: int, read: int) -> None:
    reader = Reader(PartlyLabelled({9: samples}), Decoder(6, 1), Division(0.5))
    with pytest.raises(ValueError, match=f"none of its first {read:,} samples carries a label"):
        list(reader)


def test_each_class_is_divided_into_queries_and_references_by_the_share() -> None:
    counts = {0: 100, 1: 50, 4: 10}
    reader = Reader(Held(counts), Decoder(6, 1), Division(0.2), batch=32)
    assert reader.length == 160
    taken: Counter[tuple[str, int]] = Counter()
    for batch in reader:
        assert batch.image_BHWC.shape == (len(batch.label_B), 6, 6, 1)
        taken.update((batch.part, label) for label in batch.label_B.tolist())
    expected = {("query", c): n // 5 for c, n in counts.items()}
    expected |= {("reference", c): n - n // 5 for c, n in counts.items()}
    assert taken == expected
    assert reader.seen == 160


@table(
    ("division", "references", "queries"),
    [
        (Division(0), 40, 0),
        (Division(1), 0, 40),
        (Division(0.5, references_per_class=3, queries_per_class=2), 6, 4),
        (Division(1 / 3), 28, 12),
    ],
    ids=["none", "all", "few", "third"],
)
def test_a_division_gives_the_expected_numbers_of_references_and_queries(
    division: Division, references: int, queries: int
) -> None:
    found: Counter[str] = Counter()
    for batch in Reader(Held({0: 20, 1: 20}), Decoder(6, 1), division):
        found[batch.part] += len(batch.label_B)
    assert found["reference"] == references
    assert found["query"] == queries


@table("count", [5, 16, 17, 31, 33, 49, 64])
def test_no_batch_is_much_smaller_than_asked(count: int) -> None:
    reader = Reader(Held({0: count}), Decoder(6, 1), Division(0), batch=16)
    sizes = [len(batch.label_B) for batch in reader]
    assert sum(sizes) == count
    assert max(sizes) <= 16
    assert min(sizes) >= min(count, 8)


def test_balanced_takes_as_many_rows_of_each_class_as_the_rarest_class_has() -> None:
    label = torch.tensor([3] * 50 + [1] * 7 + [0] * 20)
    rows = balanced(label, seed=1)
    assert torch.equal(rows, rows.unique())
    assert torch.bincount(label[rows]).tolist() == [7, 7, 0, 7]
    assert not torch.equal(rows, balanced(label, seed=2))
    drawn = torch.cat([balanced(label, seed) for seed in range(400)])
    often = torch.bincount(drawn[drawn < 50], minlength=50)  # each of 50 in 7 of 50 draws
    assert ((often - 56).abs() < 5 * (56 * 43 / 50) ** 0.5).all()


def test_several_encoders_see_the_same_images_once() -> None:
    one, two = Numbers(), Numbers()
    reader = Reader(Held({0: 60, 1: 30}), Decoder(6, 1), Division(0.5), batch=16)
    told: list[int] = []
    before = torch.get_rng_state()
    found = encode([reader], {"one": one, "two": two}, seed=3, tell=told.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(told) == 90
    assert sum(one.sizes) == 45 + 3 * 45  # references; queries plain and as two views
    a, b = found["one"], found["two"]
    assert torch.equal(a.reference_NF, b.reference_NF)
    assert torch.bincount(a.label_Q).tolist() == [15, 15]
    numbers = [*a.reference_NF[:, 0].tolist(), *a.query_QF[:, 0].tolist()]
    assert len(set(numbers)) == 45 + 30
    assert ((a.query_QF[:, 0] < 60) == (a.label_Q == 0)).all()
    assert ((a.reference_NF[:, 0] < 60) == (a.label_N == 0)).all()
    shift = a.view_QF - a.query_QF
    assert 0.5 < float(shift.std()) < 1.5
    assert not torch.equal(a.view_QF, a.other_QF)


def test_pixels_of_synthetic_classes_have_high_and_consistent_measures() -> None:
    class Pixels:
        def __call__(self, image_BCHW: torch.Tensor) -> torch.Tensor:
            return image_BCHW.flatten(1).float()

        view = __call__

    data = Synthetic(count=600, size=8, shift=0, classes=4)
    reader = Reader(data, Decoder(8), Division(0.3))
    found = measure(encode([reader], {"pixels": Pixels()})["pixels"], ks=(5, 20), probes=["convex"])
    assert found.knn[5].accuracy > 0.9
    assert found.linear["convex"].accuracy > 0.9
    assert found.retrieval[1] <= found.retrieval[10]
    assert found.similarity.intra > found.similarity.inter
    assert found.alignment == pytest.approx(0, abs=1e-9)  # the views are the images themselves
    assert found.dim == 192
    assert 1 < found.rank_me < 192
    counted = found.confusion_CC
    assert counted is not None
    assert int(counted.diagonal().sum()) / int(counted.sum()) == found.knn[20].accuracy
    plain = found.as_json()
    assert plain["knn"]["5"]["accuracy"] == found.knn[5].accuracy
    assert plain["rank_me"] == found.rank_me


def test_rows_of_the_confusion_matrix_follow_the_order_of_the_class_numbers() -> None:
    reader = Reader(Held({7: 40, 200: 40}), Decoder(6, 1), Division(0.5))
    encoded = encode([reader], {"numbers": Numbers()})["numbers"]
    found = measure(encoded, ks=(3,), probes=[])
    assert found.classes == (7, 200)
    assert found.confusion_CC is not None
    assert found.confusion_CC.sum(dim=1).tolist() == [20, 20]
    assert set(found.knn[3].per_class) == {7, 200}


@table("classes, counted", [(MOST_CONFUSED, True), (MOST_CONFUSED + 1, False)])
def test_many_classes_have_no_confusion_matrix(classes: int, counted: bool) -> None:
    label_N = torch.arange(classes).repeat(2)
    angle_N = label_N.double() / classes
    feature_NF = torch.stack([angle_N.cos(), angle_N.sin()], 1)
    encoded = Encoded(*[feature_NF, label_N] * 2, feature_NF, feature_NF)
    found = measure(encoded, ks=(1,), probes=[])
    assert (found.confusion_CC is not None) == counted
    assert (found.as_json()["confusion"] is not None) == counted
    assert found.knn[1].accuracy == found.knn[1].balanced == 1.0


def test_the_accuracy_of_a_task_is_the_mean_over_its_classes() -> None:
    per_class = {0: 1.0, 1: 0.5, 2: 0.0}
    assert task_accuracies(per_class, [[0, 1], [2]]) == [0.75, 0.0]
    with pytest.raises(ValueError, match=r"name the classes .5., which no query has: choose"):
        task_accuracies(per_class, [[0, 5]])


@table(
    ("reference", "query", "k", "message"),
    [
        ({0: 20}, {0: 20, 1: 20}, 5, "classes .1. that no reference has"),
        ({0: 20, 1: 20}, {0: 20}, 5, "all queries are of class 0"),
        ({0: 3, 1: 3}, {0: 20, 1: 20}, 1, f"retrieval of the {RETRIEVED[-1]} nearest; give more$"),
        ({0: 9, 1: 9}, {0: 20, 1: 20}, 20, "18 references are fewer than k = 20.* with --k$"),
        ({0: 20, 1: 20}, {0: 20, 1: 1}, 5, "at least two of each"),
    ],
    ids=["class", "one", "few", "fewer", "rare"],
)
def test_sets_that_cannot_be_measured_are_refused(
    reference: dict[int, int], query: dict[int, int], k: int, message: str
) -> None:
    readers = [
        Reader(Held(counts), Decoder(6, 1), Division(share))
        for counts, share in ((reference, 0), (query, 1))
    ]
    with pytest.raises(ValueError, match=message):
        check(encode(readers, {"numbers": Numbers()})["numbers"], [k])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"query_share": 1.5}, "query_share 1.5"), ({"query_share": 0, "queries_per_class": 0}, "1")],
    ids=["share", "none"],
)
def test_division_rejects_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Division(**arguments)
