"""The online probe predicts before it learns, beside baselines without an encoder."""

from __future__ import annotations

import math
import tracemalloc
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from observe_records import step
from prometheus_client import CollectorRegistry

from stream_ssl.observe.catalogue import CLASSIFIERS
from stream_ssl.observe.metrics import LearnerMetrics
from stream_ssl.observe.prequential import MOST_CLASSES, Prequential


def knn(
    query: Sequence[float],
    references: Sequence[Sequence[float]],
    labels: Sequence[int],
    k: int,
    temperature: float,
) -> int:
    """Return the class of one query by weighted nearest neighbours, in plain Python."""

    def cosine(a: Sequence[float], b: Sequence[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    near = sorted(
        (
            (cosine(query, reference), label)
            for reference, label in zip(references, labels, strict=True)
        ),
        reverse=True,
    )[:k]
    votes: dict[int, float] = {}
    for similarity, label in near:
        votes[label] = votes.get(label, 0.0) + math.exp(similarity / temperature)
    return min(votes, key=lambda label: (-votes[label], label))


def stream(
    batches: int, size: int = 16, classes: int = 4, spread: float = 0.2, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        label = torch.randint(0, classes, (size,), generator=generator)
        rows = torch.eye(classes, 8)[label] + spread * torch.randn(size, 8, generator=generator)
        found.append((torch.nn.functional.normalize(rows, dim=1), label))
    return found


def fed(probe: Prequential, *batches: tuple[torch.Tensor, torch.Tensor]) -> Prequential:
    for keys, label in batches:
        probe.update(keys, label)
    return probe


def test_the_probe_learns_separable_classes_and_baselines_do_not() -> None:
    found = fed(Prequential(window=300), *stream(60)).read()
    assert set(found) == set(CLASSIFIERS)
    assert found["linear"][0] > 0.97
    assert found["knn"][0] > 0.97
    for name in ("no_change", "majority"):
        assert found[name][0] < 0.5
        assert abs(found[name][2]) < 0.2  # kappa: no better than chance


def test_random_labels_give_accuracies_at_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probe learned a batch before its prediction, neighbours would reveal the labels."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.nn.functional.normalize(torch.randn(640, 8, generator=generator), dim=1)
    label = torch.randint(0, 4, (640,), generator=generator)
    monkeypatch.setattr("stream_ssl.observe.prequential.NEIGHBOURS", 1)
    probe = Prequential(window=640)
    found = fed(probe, *zip(rows.split(16), label.split(16), strict=True)).read()
    for accuracy, balanced, kappa in found.values():
        assert accuracy == pytest.approx(0.25, abs=0.09)
        assert balanced == pytest.approx(0.25, abs=0.09)
        assert kappa == pytest.approx(0, abs=0.12)


def test_a_stream_in_blocks_makes_no_change_the_best_baseline() -> None:
    batches = [(keys, torch.full_like(label, n // 8)) for n, (keys, label) in enumerate(stream(32))]
    found = fed(Prequential(window=400), *batches).read()
    assert found["no_change"][0] > 0.97
    assert found["majority"][0] < 0.9


def test_the_accuracy_equals_the_accuracy_of_a_naive_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours, their window, and the window of the figures, sample by sample."""
    window, size, batches = 48, 16, stream(9, spread=0.6)
    monkeypatch.setattr("stream_ssl.observe.prequential.NEIGHBOURS", 5)
    probe = fed(Prequential(window=window), *batches)
    seen: deque[tuple[list[float], int]] = deque(maxlen=window)
    right: list[bool] = []
    for keys, label in batches:
        held = list(seen)
        for row, truth in zip(keys.tolist(), label.tolist(), strict=True):
            if held:
                guess = knn(row, [r for r, _ in held], [c for _, c in held], 5, 0.07)
                right.append(guess == truth)
        seen.extend(zip(keys.tolist(), label.tolist(), strict=True))
    last = right[-window:]
    assert len(right) == 8 * size
    # Equal votes may fall to another class: the twin numbers classes by label.
    assert probe.read()["knn"][0] == pytest.approx(sum(last) / len(last), abs=1 / window)


def test_figures_forget_samples_that_are_older_than_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stream_ssl.observe.prequential.NEIGHBOURS", 5)
    probe = Prequential(window=64)
    fed(probe, *stream(20, seed=2))
    generator = torch.Generator().manual_seed(3)
    for keys, label in stream(40, seed=4):
        drawn = torch.randint(0, 4, (len(label),), generator=generator)
        probe.update(keys, drawn)
    assert probe.read()["knn"][0] < 0.5
    fed(probe, *stream(12, seed=5))
    assert probe.read()["knn"][0] > 0.9


def test_balanced_accuracy_and_kappa_expose_a_guess_of_the_dominant_class() -> None:
    generator = torch.Generator().manual_seed(6)
    rows = torch.nn.functional.normalize(torch.randn(400, 8, generator=generator), dim=1)
    label = (torch.rand(400, generator=generator) < 0.1).long()
    found = fed(Prequential(), *zip(rows.split(20), label.split(20), strict=True)).read()
    accuracy, balanced, kappa = found["majority"]
    assert accuracy > 0.85
    assert balanced == pytest.approx(0.5)
    assert kappa == pytest.approx(0)


def test_unlabelled_samples_replays_and_refused_keys_are_left_out() -> None:
    probe = Prequential()
    (keys, label), *_ = stream(1)
    probe.consume(step(keys_BD=keys, labels_B=torch.full((16,), -1)))
    probe.consume(step(keys_BD=keys, labels_B=label, replay=True))
    probe.consume(step(keys_BD=keys, labels_B=label, admission=None))
    assert not probe._index
    probe.consume(step(keys_BD=keys, labels_B=label))
    assert probe.read() == {}  # nothing was known when the first batch came
    assert probe.take_new() == 0
    some = torch.where(torch.arange(16) % 2 == 0, label, torch.tensor(-1))
    probe.consume(step(keys_BD=keys, labels_B=some))
    assert probe.take_new() == 8
    assert probe.take_new() == 0
    assert probe.read()["knn"][0] == 1.0  # the very same keys


def test_labels_may_be_large_and_are_bounded_in_number() -> None:
    keys, label = stream(1)[0]
    probe = fed(Prequential(window=64), (keys, label * 2**29), (keys, label * 2**29))
    assert probe.read()["knn"][0] == 1.0
    many = torch.arange(MOST_CLASSES + 500)
    fed(probe, (torch.eye(8)[many % 8], many))
    assert len(probe._index) == MOST_CLASSES


def test_figures_equal_the_figures_of_river() -> None:
    """The second window has a single class."""
    from river import metrics

    for classes in (5, 1):
        probe = fed(Prequential(window=64), *stream(7, classes=classes, spread=1.0))
        true, *found = torch.cat([*probe._scored], dim=1).tolist()
        for name, guessed in zip(CLASSIFIERS, found, strict=True):
            scores = metrics.Accuracy(), metrics.BalancedAccuracy(), metrics.CohenKappa()
            for one in scores:
                for pair in zip(true, guessed, strict=True):
                    one.update(*pair)
            assert probe.read()[name] == pytest.approx([one.get() for one in scores])


def test_the_probe_keeps_a_bounded_window_of_samples() -> None:
    """Streams have thousands of classes, and each pair of two of them may be confused once."""
    probe = fed(Prequential(window=64), *stream(20, classes=8, size=64))
    batches, label = stream(60, classes=8, size=64), torch.arange(60 * 64)
    tracemalloc.start()
    try:
        for number, (keys, _) in enumerate(batches):
            probe.update(keys, (label[number * 64 :][:64] * 37) % 1000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 300_000


def test_the_probe_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    fed(Prequential(), *stream(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_figures_are_exported_by_classifier() -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    value = registry.get_sample_value
    assert value("stream_ssl_prequential_accuracy", {"classifier": "knn"}) is None
    probe = fed(Prequential(), *stream(10))
    metrics.observe_prequential(probe)
    assert value("stream_ssl_prequential_accuracy", {"classifier": "knn"}) > 0.9
    assert value("stream_ssl_prequential_kappa", {"classifier": "linear"}) > 0.5
    assert value("stream_ssl_prequential_balanced_accuracy", {"classifier": "no_change"}) < 0.6
    assert value("stream_ssl_prequential_samples_total") == 9 * 16
