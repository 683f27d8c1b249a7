"""The answer to whether a run learns: accuracy, loss, lag, and updates that are missing."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from answers_world import NEGATIVES, QUESTIONS, STATS, Run, asked

from stream_ssl.observe.wording import percent


def test_the_answers_on_a_young_run_advise_to_wait() -> None:
    """The run first has no batch, and then a few updates at chance."""
    run = Run()
    run.pass_(10, run.sends())
    found = asked(run)
    assert (found["Learning"].level, found["Memory"].level) == ("wait", "wait")
    assert found["Learning"].says.startswith("No update yet, 10 s after the start")
    run.probes(0.1)
    run.fills()
    run.pass_(30, run.sends(), run.learns(loss=5.55))
    found = asked(run)
    assert found["Learning"].level == "wait"
    assert found["Learning"].says.startswith(
        "Too early to tell after 3 updates. kNN of held-out images 10 % (chance 10 %). Loss 5.55"
    )
    assert (found["To do"].level, found["To do"].word) == ("wait", "wait")
    assert found["To do"].says == "Look again in 66 min: the run then has 300 updates."
    assert "No labels; the embeddings take 38 directions" in found["Memory"].says
    run.probes(0.2)  # an encoder without any update may reach this, too
    run.pass_(30, run.sends(), run.learns(loss=5.0))
    assert asked(run)["Learning"].level == "wait"
    run.starts()
    found = asked(run)
    assert {found[one].level for one in QUESTIONS} - {"good"} == {"wait"}


def test_one_direction_is_not_plural() -> None:
    run = Run()
    run.fills()
    held = replace(STATS, effective_rank=1.0)
    run.learner.learner.of_memories.observe("working", held, None)
    run.pass_(10, run.sends())
    assert "the embeddings take 1 direction." in asked(run)["Memory"].says


def test_steps_without_an_update_do_not_count_as_updates() -> None:
    run = Run()
    run.fills()
    run.steps = 5  # too few new samples, before the first update
    run.pass_(20, run.sends(), run.drops("yard"))

    def skips() -> None:
        run.steps += 9

    run.pass_(10, run.sends())
    run.pass_(400, run.sends(), skips, run.learns())
    assert run.steps == 405
    assert asked(run)["Learning"].says.startswith("Too early to tell after 40 updates")


def test_a_continued_run_counts_its_earlier_steps_as_updates() -> None:
    run = Run()
    run.fills()
    run.steps = 200
    run.learner.learner.of_checkpoints.resumed(200, time.time())
    run.pass_(10, run.sends())
    run.pass_(60, run.sends(), run.learns())
    assert asked(run)["Learning"].says.startswith("Too early to tell after at most 206 updates")
    assert asked(run)["To do"].says.endswith("the run then has 300 updates.")


def test_a_look_before_the_checkpoint_is_loaded_does_not_count_the_run_as_new() -> None:
    run = Run()
    run.learner.learner._families.set("starting", 1.0)
    run.pass_(10, run.sends())
    run.learner.learner.started()
    run.steps = 400
    run.learner.learner.of_checkpoints.resumed(400, time.time())
    run.pass_(60, run.sends(), run.learns())
    assert not asked(run)["Learning"].says.startswith("Too early to tell")


def test_a_lag_that_grows_without_producers_does_not_count_as_a_fault() -> None:
    run = Run()
    run.steps = 300
    run.fills()
    for lag in range(0, 120, 10):
        run.pass_(10, run.nothing(producers=0), run.learns(lag_seconds=float(lag)))
    assert "behind" not in asked(run)["Health"].says
    assert "behind" not in asked(run)["To do"].says


def test_an_accuracy_that_never_rose_is_worth_a_look_even_far_above_chance() -> None:
    run = Run()
    run.steps = 300
    run.probes(0.31, first=0.31)
    run.pass_(10, run.sends())
    assert "hardly more" not in asked(run)["Learning"].says, "no update could have changed it"
    run.learner.learner.of_checkpoints.resumed(300, time.time())
    run.pass_(60, run.sends())
    run.pass_(600, run.sends(), run.learns())
    found = asked(run)
    assert found["Learning"].level == "watch"
    assert found["Learning"].says.startswith(
        "kNN of held-out images 31 % (chance 10 %, at the run's start 31 %), unchanged in the last "
        "11 min; that is hardly more than at the start. Loss 4.00"
    )
    assert found["To do"].level == "watch"
    run.probes(0.36)
    run.pass_(600, run.sends(), run.learns())
    assert asked(run)["Learning"].level == "good"
    run.probes(0.30)
    run.pass_(10, run.sends(), run.learns())
    assert "; that is less than at the start." in asked(run)["Learning"].says


def test_the_loss_is_compared_with_chance_without_labels() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns(loss=5.0))
    learning = asked(run)["Learning"]
    assert learning.level == "wait"
    assert "it needs labels" in learning.says
    run.pass_(600, run.sends(), *5 * [run.learns(loss=5.0)])
    assert asked(run)["Learning"].level == "good"
    run = Run()
    run.pass_(60, run.sends(), run.learns(loss=5.5))
    found = asked(run)
    assert [found[one].level for one in ("Learning", "To do")] == ["wait", "wait"]
    run.pass_(600, run.sends(), *5 * [run.learns(loss=5.5)])
    found = asked(run)
    assert [found[one].level for one in ("Learning", "To do")] == ["watch", "watch"]
    assert found["To do"].says.startswith("No condition holds, but look at Learning: Loss 5.50")


def test_a_loss_at_chance_makes_a_moderate_accuracy_doubtful() -> None:
    """Pixels alone give more than chance, and a learning rate of 1e-12 changes nothing."""
    for loss, level in ((5.5, "watch"), (5.0, "good")):
        run = Run()
        run.steps = 300
        run.learner.learner._families.set("prequential_accuracy", 0.25, classifier="knn")
        run.learner.learner._families.set("prequential_accuracy", 0.1, classifier="majority")
        run.pass_(600, run.sends(), run.learns(loss=loss))
        learning = asked(run)["Learning"]
        assert learning.level == level
        assert ("may be an untrained encoder" in learning.says) == (level == "watch")


def test_the_answers_name_a_growing_lag_before_its_condition_begins() -> None:
    run = Run()
    run.steps = 300
    for lag in range(0, 120, 10):
        run.pass_(10, run.sends(), run.learns(lag_seconds=float(lag)))
    found = asked(run)
    assert [found[one].level for one in ("Learning", "Health", "To do")] == [
        *("watch", "watch", "watch")
    ]
    assert found["Health"].says.endswith("further and further behind the stream.")
    told = "The learner is 2 min behind the stream; the lag grew by 50 s in the last 50 s. "
    assert found["Learning"].says.startswith(told)
    assert found["To do"].says.startswith(told + "After a bulk upload, wait")
    assert found["To do"].links == [("lag", "runbooks/lag")]
    run.pass_(100, run.sends(), run.learns(lag_seconds=110.0))
    assert {one.level for one in asked(run).values()} == {"good", "wait"}, "an old lag that waits"


def test_the_answer_gives_a_change_of_accuracy_with_its_error() -> None:
    run = Run()
    run.fills()
    run.steps = 300
    told = {
        0.43: ("up 3.0 ± 1.2 points", "good"),
        0.42: ("no clear change (+2.0 ± 1.2 points)", "good"),
        0.38: ("no clear change (-2.0 ± 1.2 points)", "good"),
        0.34: ("down 6.0 ± 1.2 points", "watch"),
    }
    run.probes(0.4)
    run.pass_(300, run.sends(), run.learns())
    for accuracy, (change, level) in told.items():
        run.probes(accuracy, error=0.012)
        run.pass_(20, run.sends(), run.learns())
        found = asked(run)["Learning"]
        assert f"{change} in the last" in found.says
        assert found.level == level
    run.probes(0.34, error=0.04)
    run.pass_(20, run.sends(), run.learns())
    assert asked(run)["Learning"].level == "good", "a fall of 1.5 standard errors"


def test_a_slow_learner_does_not_count_as_idle_between_its_updates() -> None:
    run = Run()
    run.fills()
    run.probes(0.44)
    run.steps = 300
    for _ in range(5):
        run.pass_(10, run.sends(2), run.learns())
        run.pass_(110, run.sends(2))
    learning = asked(run)["Learning"]
    assert learning.level == "good"
    assert learning.says.endswith("The last update is 2 min old, as usual for this stream.")


def test_the_answer_compares_the_accuracy_with_that_of_the_most_frequent_class() -> None:
    run = Run()
    put = run.learner.learner._families.set
    run.steps = 300
    for knn, level in ((0.54, "good"), (0.48, "watch")):  # 0.48 may be above 0.46 by chance
        put("prequential_accuracy", knn, classifier="knn")
        put("prequential_accuracy", 0.46, classifier="majority")
        run.pass_(60, run.sends(), run.learns())
        learning = asked(run)["Learning"]
        assert learning.level == level
        says = f"kNN of the stream's next samples {percent(knn)}"
        assert f"{says} (by guessing the most frequent class: 46 %)" in learning.says
        assert ("This accuracy says nothing" in learning.says) == (knn < 0.5)


def test_kappa_shows_learning_in_a_stream_with_a_dominant_class() -> None:
    """If 82 % of the stream is one class, no encoder reaches 1.1 times this accuracy."""
    run = Run()
    put = run.learner.learner._families.set
    run.steps = 300
    put("prequential_accuracy", 0.82, classifier="majority")
    put("prequential_accuracy", 0.84, classifier="knn")
    for kappa, level in ((0.02, "watch"), (0.31, "good")):
        put("prequential_kappa", kappa, classifier="knn")
        run.pass_(60, run.sends(), run.learns())
        learning = asked(run)["Learning"]
        assert learning.level == level
        assert ("; kappa 0.31, and 0 for guessing" in learning.says) == (level == "good")
        assert ("This accuracy says nothing" in learning.says) == (level == "watch")


def test_a_change_on_the_stream_within_its_error_is_not_clear() -> None:
    """With 2,048 samples, accuracies of 0.54 and 0.55 have a standard error of 1.6 points."""
    run = Run()
    put = run.learner.learner._families.set
    run.steps = 300
    put("prequential_covered_samples", 2048)
    for knn in (0.54, 0.55):
        put("prequential_accuracy", knn, classifier="knn")
        run.pass_(60, run.sends(), run.learns())
    assert "no clear change (+1.0 \N{PLUS-MINUS SIGN} 1.6 points)" in asked(run)["Learning"].says
    put("prequential_accuracy", 0.64, classifier="knn")
    run.pass_(60, run.sends(), run.learns())
    assert "up 10.0 \N{PLUS-MINUS SIGN} 1.5 points" in asked(run)["Learning"].says


def test_the_answer_gives_no_accuracy_below_100_labelled_samples() -> None:
    run = Run()
    put = run.learner.learner._families.set
    run.steps = 300
    put("prequential_accuracy", 0.0, classifier="knn")
    run.learner.learner._families.add("prequential_samples_total", 3)
    run.pass_(60, run.sends(), run.learns())
    says = asked(run)["Learning"].says
    assert "No accuracy is known: 3 labelled samples came, and it needs 100" in says
    run.learner.learner._families.add("prequential_samples_total", 97)
    run.pass_(60, run.sends(), run.learns())
    assert "kNN of the stream's next samples 0 %" in asked(run)["Learning"].says


def test_an_accuracy_from_before_the_first_update_is_no_evidence_of_learning() -> None:
    """A loss below chance shows that the run learns, until the set is evaluated again."""
    run = Run()
    run.probes(0.27, first=0.27, at=0)
    for loss, level in ((4.0, "good"), (math.log(NEGATIVES + 1), "watch")):
        run.steps = 300
        run.pass_(60, run.sends(), run.learns(loss=loss))
        learning = asked(run)["Learning"]
        assert learning.level == level
        told = (
            "kNN of held-out images was 27 % before the first update, and was not evaluated since."
        )
        assert told in learning.says
        assert "unchanged" not in learning.says


def test_a_run_that_only_repeats_its_memory_is_worth_a_look() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns())
    for step_loss in (3.0, 1.0):
        repeats = run.learns(loss=step_loss, origins_B=[], replay=8, batch=0)
        run.steps = max(run.steps, 300)
        run.pass_(700, run.sends(), run.drops("yard", "gate"), repeats)
    learning = asked(run)["Learning"]
    assert learning.level == "watch"
    assert learning.says.startswith("The updates repeat old samples, because no producer sends")
