"""Continual streams follow the laws that their arguments name."""

import functools
import itertools

import numpy as np
import pytest
from going_on import check_goes_on
from shaped_streams import draw, sigmas
from source_files import pixels, write_idx
from table import table

from stream_ssl.producers.shaping import Continual, Shaped
from stream_ssl.producers.shaping.continual import kept_shares
from stream_ssl.producers.sources import IdxDataset, Synthetic

KINDS = {
    "keep": {"imbalance": 3},
    "incremental": {"tasks": 5},
    "blurred": {"tasks": 5, "blur": 30},
    "blocks": {"tasks": 5, "block": 17},
    "concurrent": {"tasks": 5, "concurrent": 3},
}


class Listed:
    """Labelled samples that are made once, because a continual stream reads them for each task."""

    name = "listed"

    def __init__(self, classes):
        self._given = list(Synthetic(count=20_000, classes=classes, size=2, shift=0).samples())

    def samples(self, position=None):
        return iter(self._given)


listed = functools.cache(Listed)


@pytest.fixture
def balanced(tmp_path):
    """One pass over ten classes of 100 images each, 8 x 8 grey, in random order."""
    write_idx(tmp_path, "train", pixels(1000, 8, 8), np.arange(1000) % 10, packed=False)
    return IdxDataset(tmp_path)


def labels(source):
    return np.array([sample.label for sample in draw(source)])


@pytest.mark.parametrize("kind", ["incremental", "blurred", "blocks", "concurrent"])
def test_every_sample_comes_once_and_each_task_keeps_the_order_of_the_source(balanced, kind):
    stream = Continual(balanced, kind, **KINDS[kind])
    ids = [sample.id for sample in draw(stream)]
    assert sorted(ids) == sorted(sample.id for sample in draw(balanced))
    for task in stream.tasks:
        given = [sample.id for sample in draw(balanced) if sample.label in task]
        assert [sample.id for sample in draw(stream) if sample.label in task] == given


def test_incremental_sends_one_task_after_the_other(balanced):
    task = labels(Continual(balanced, "incremental", tasks=5)) // 2
    assert np.array_equal(task, np.repeat(np.arange(5), 200))
    # Within a task the classes are mixed, as in the source.
    label = labels(Continual(balanced, "incremental", tasks=5))[:200]
    assert 60 < np.count_nonzero(label[1:] != label[:-1]) < 140


def test_shuffle_classes_assigns_classes_to_tasks_by_the_seed(balanced):
    plain = Continual(balanced, "incremental", tasks=3)
    assert plain.tasks == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    drawn = [Continual(balanced, tasks=3, shuffle_classes=True, seed=s).tasks for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(itertools.chain(*drawn[0])) == list(range(10))
    stream = Continual(balanced, "incremental", tasks=3, shuffle_classes=True, seed=1)
    assert set(labels(stream)[:400]) == set(drawn[0][0])


def test_per_task_limits_the_samples_of_each_task(balanced):
    task = labels(Continual(balanced, "incremental", tasks=5, per_task=30)) // 2
    assert np.array_equal(task, np.repeat(np.arange(5), 30))


def test_blurred_mixes_two_tasks_in_proportion_only_near_their_border():
    source = listed(2)
    blur = 4000
    label = labels(Continual(source, "blurred", classes=2, blur=blur))
    border = int(np.count_nonzero(label == 0))
    assert (label[: border - blur] == 0).all()
    assert (label[border + blur :] == 1).all()
    zone = label[border - blur : border + blur]
    # The test leaves the ends out, because draws there depend on the earlier draws.
    for part, law in zip(np.array_split(zone, 10)[:9], np.arange(0.05, 0.9, 0.1), strict=True):
        assert sigmas(part.mean(), law, len(part)) < 5


def test_blocks_hold_one_task_and_rounds_visit_every_task(balanced):
    task = labels(Continual(balanced, "blocks", tasks=5, block=20)) // 2
    rounds = task.reshape(10, 5, 20)
    assert (rounds == rounds[:, :, :1]).all()
    visited = rounds[:, :, 0]
    assert (np.sort(visited, axis=1) == np.arange(5)).all()
    assert len({tuple(order) for order in visited.tolist()}) > 5  # a new order in each round


def test_blocks_send_the_rest_of_a_task_as_a_shorter_block(balanced):
    task = labels(Continual(balanced, "blocks", tasks=5, block=150)) // 2
    lengths = [len(list(run)) for _, run in itertools.groupby(task.tolist())]
    assert sum(lengths) == 1000
    assert task.size == 1000
    for number in range(5):
        assert np.count_nonzero(task == number) == 200


def test_concurrent_tasks_share_the_stream_evenly_and_follow_in_order():
    source = listed(5)
    label = labels(Continual(source, "concurrent", classes=5, concurrent=2))
    start = label[:6000]
    assert set(start.tolist()) == {0, 1}
    assert sigmas(np.mean(start == 0), 0.5, len(start)) < 5
    same = np.mean(start[1:] == start[:-1])
    assert sigmas(same, 0.5, len(start)) < 5  # independent draws
    for now in np.array_split(label, 100):
        assert len(set(now.tolist())) <= 4  # two at once; a replacement or two within a window
    firsts = [int(np.flatnonzero(label == task)[0]) for task in range(5)]
    assert firsts[2:] == sorted(firsts[2:])


@pytest.mark.parametrize(("kind", "rho"), [("keep", 9), ("incremental", 27), ("incremental", 1)])
def test_the_first_class_is_imbalance_times_as_frequent_as_each_other_class(kind, rho):
    source = listed(10)
    counts = np.bincount(labels(Continual(source, kind, imbalance=rho)), minlength=10)
    plain = np.bincount(labels(source), minlength=10)
    assert counts[0] == plain[0]
    for other in range(1, 10):
        if rho == 1:
            assert counts[other] == plain[other]
        else:
            assert sigmas(counts[other] / plain[other], 1 / rho, plain[other]) < 5


def test_the_tail_profile_reduces_class_counts_by_a_constant_factor():
    source = listed(10)
    counts = np.bincount(labels(Continual(source, imbalance=100, profile="tail")), minlength=10)
    plain = np.bincount(labels(source), minlength=10)
    for label in range(10):
        law = 100 ** (-label / 9)
        assert abs(counts[label] - plain[label] * law) <= 5 * np.sqrt(plain[label] * law)


def test_kept_shares_follow_the_order_of_the_tasks():
    assert kept_shares(np.array([2, 0, 1]), 5.0, "one").tolist() == [0.2, 0.2, 1.0]
    assert kept_shares(np.array([0]), 5.0, "tail").tolist() == [1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_continual_stream_resumes_exactly_after_every_position(balanced, kind):
    settings = {"seed": 3, "imbalance": 2, **KINDS[kind]}
    stream = check_goes_on(lambda: Continual(balanced, kind, **settings), every=61)
    assert len(stream) > 300


@table("kind", KINDS)
def test_equal_seeds_give_the_same_continual_stream(balanced, kind):
    first, again, other = (
        [s.id for s in draw(Continual(balanced, kind, seed=seed, imbalance=2, **more))]
        for seed in (1, 1, 2)
        for more in [{key: v for key, v in KINDS[kind].items() if key != "imbalance"}]
    )
    assert first == again
    assert first != other


def test_a_continual_stream_reads_its_source_only_as_samples_are_taken():
    taken = []

    class Counted(Synthetic):
        def samples(self, position=None):
            for sample, after in super().samples(position):
                taken.append(sample.id)
                yield sample, after

    source = Counted(count=5000, size=2, shift=0)
    stream = Continual(source, "incremental").samples()
    assert taken == []
    for _ in range(10):
        next(stream)
    assert len(taken) < 400


def test_a_shaped_continual_stream_resumes_after_every_position(balanced):
    def build():
        inner = Continual(balanced, "blocks", tasks=2, block=25)
        return Shaped(inner, duplicates=0.3, near=0, window=40)

    check_goes_on(build, every=333)


def test_a_position_of_other_settings_or_without_a_count_is_refused(balanced, tmp_path):
    _, position = next(Continual(balanced, "incremental", tasks=5).samples())
    with pytest.raises(ValueError, match="kind was 'incremental' and is 'blocks'"):
        Continual(balanced, "blocks", tasks=5).samples(position)
    other = IdxDataset(tmp_path, seed=7)
    with pytest.raises(ValueError, match="seed was 0 and is 7"):
        Continual(other, "incremental", tasks=5).samples(position)
    for broken in ("x", -1, 2**63):
        with pytest.raises(ValueError, match="no number of samples"):
            Continual(balanced, "incremental", tasks=5).samples(position | {"at": broken})


def test_an_endless_source_is_refused_unless_per_task_ends_each_task(tmp_path):
    write_idx(tmp_path, "train", pixels(20, 8, 8), np.arange(20) % 10, packed=False)
    endless = IdxDataset(tmp_path, epochs=None)
    with pytest.raises(ValueError, match="never ends, so its first task would not"):
        Continual(endless, "incremental")
    with pytest.raises(ValueError, match="never ends"):
        Continual(Synthetic(), "blocks")
    assert len(labels(Continual(endless, "incremental", per_task=7))) == 70


def test_a_label_beyond_the_classes_is_refused():
    with pytest.raises(ValueError, match=r"is of class \d.*the classes 0 to 2.*set classes"):
        labels(Continual(Synthetic(count=50, size=2, shift=0), "incremental", classes=3))


def test_a_limit_of_tasks_needs_an_order_by_tasks(balanced):
    with pytest.raises(ValueError, match=r'per_task 7: kind "keep" .* set per_task to null'):
        Continual(balanced, per_task=7)
