"""The five answers on the states of real metrics, health and watches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from answers_world import NEGATIVES, QUESTIONS, STATS, Run, asked, garbage, healthy_run

from stream_ssl.learning.divergence import Divergence
from stream_ssl.observe import families as exported
from stream_ssl.observe.answer import Answer, Level
from stream_ssl.observe.answers import _remedy, answers
from stream_ssl.observe.conditions import TABLE
from stream_ssl.observe.page import history
from stream_ssl.observe.problems import census, problems_of
from stream_ssl.observe.watch import Watched
from stream_ssl.observe.wording import percent

CHANCE = f"{math.log(NEGATIVES + 1):.2f}"


@pytest.fixture(scope="module")
def healthy() -> Run:
    return healthy_run()


def test_a_healthy_run_gets_five_good_answers(healthy: Run) -> None:
    found = asked(healthy)
    assert {one.level for one in found.values()} == {"good"}
    learning = found["Learning"]
    assert learning.says == (
        "kNN of held-out images 46 % (chance 10 %), up 3.0 points in the last 20 min. "
        f"Loss 4.00; chance is {CHANCE}. 6 updates in the last minute."
    )
    assert ("loss and accuracy", "#figures") in learning.links
    assert found["Health"].says.startswith("None of ")
    assert found["Health"].says.endswith("conditions holds, and receiver and learner answer.")
    assert found["Producers"].says == (
        "2 producers connected, 2.0 samples/s in the last minute. "
        "In the last 10 min, each producer has 100 % of its samples used."
    )
    assert found["Memory"].says == (
        "1,000 of 1,024 slots filled, 2.0 % near-duplicates. 3 classes; the largest, class 0, has "
        "40 % of the labelled slots. gate has 70 % of the slots."
    )
    assert found["To do"].says == "0 conditions need attention."


def test_the_answer_on_the_memory_sums_the_slots_of_all_ranks() -> None:
    """The figures are those of one shard, and `status` adds up the shards of all ranks."""
    run, group = Run(), SimpleNamespace(size=2, waited=0.0, bytes=0, collectives=0)
    run.fills()
    run.learner.learner.observe_ranks([1.0, 1.0], [1000, 990], cast("Any", group))
    run.pass_(10, run.sends(), run.learns())
    says = asked(run)["Memory"].says
    assert says.startswith("1,990 of 2,048 slots filled on 2 ranks, 2.0 % near-duplicates.")
    assert says.endswith("gate has 70 % of the slots of the first rank.")


def test_the_answer_counts_updates_over_the_span_that_the_text_names() -> None:
    run = Run()
    run.steps = 300
    said = []
    for _ in range(16):
        run.pass_(10, run.sends(), run.learns())
        said.append(asked(run)["Learning"].says.rpartition("held-out set. ")[2])
    assert said[:5] == [
        "1 update in the last 10 s.",
        *(f"{count} updates in the last {10 * count} s." for count in range(2, 6)),
    ]
    assert set(said[5:]) == {"6 updates in the last minute."}


def test_a_receiver_answers_that_no_memory_is_here() -> None:
    assert Run().ask("receiver", "receiver/memory") == {
        "error": "no memory here: this process has none"
    }


def test_to_do_advises_to_start_a_producer_if_none_is_connected() -> None:
    run = Run()
    run.pass_(10, run.sends(producers=0, samples=0))
    found = asked(run)
    assert (found["Producers"].level, found["Producers"].says) == (
        "wait",
        "No producer is connected.",
    )
    assert found["To do"].says == "Start a producer: stream-ssl produce, or a program of your own."


def test_a_starting_process_does_not_call_the_other_process_down() -> None:
    run = Run()
    assert run.ask("learner", "run")["problems"][0]["name"] == "down"
    run.starts()
    told = run.ask("learner", "run")
    assert told["problems"] == []
    assert [one["level"] for one in told["answers"]] == ["wait"] * 5
    assert told["answers"][1]["says"] == "receiver and learner: starting."


def test_the_answers_explain_an_empty_memory_by_dropped_near_duplicates() -> None:
    run = Run()
    run.pass_(30, run.sends(), run.drops("gate", "yard"))
    found = asked(run)
    why = "because the samples are dropped as near-duplicates."
    assert found["Learning"].says == f"No update yet, 30 s after the start, {why}"
    assert found["Memory"].says == f"No slot holds a sample, {why}"
    assert {one.level for one in found.values()} == {"watch", "good"}
    assert found["To do"].level == "watch"


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose short tracks are full after minutes instead of hours."""
    monkeypatch.setattr(history, "POINTS", 20)
    return Run()


def test_the_answer_names_the_hours_without_an_update(old: Run) -> None:
    old.pass_(3 * 3600, old.nothing(), every=120)
    says = asked(old)["Learning"].says
    assert says.startswith("No update yet, 3.0 h after the start")
    old.pass_(300, old.sends(), old.learns())
    old.pass_(5 * 3600, old.nothing(), every=120)
    assert re.match(r"No update for (4\.[5-9]|5\.0) h", asked(old)["Learning"].says)


def test_the_answers_name_a_lag_that_grows_late_in_a_run(old: Run) -> None:
    old.pass_(3000, old.sends(), old.learns())
    for lag in range(0, 120, 10):
        old.pass_(10, old.sends(), old.learns(lag_seconds=float(lag)))
    assert asked(old)["Health"].says.endswith("further and further behind the stream.")
    assert "the lag grew by 50 s in the last 50 s" in asked(old)["To do"].says


def test_the_answer_on_learning_names_updates_that_have_stopped(healthy: Run) -> None:
    """A rate of 0 is bad, even while the window of a count still contains updates."""
    run = Run()
    run.fills()
    run.probes(0.44)
    run.steps = 300
    run.pass_(300, run.sends(), run.learns())
    assert asked(run)["Learning"].level == "good"
    run.pass_(90, run.nothing())
    learning = asked(run)["Learning"]
    assert learning.level == "watch"
    assert learning.says.startswith("No update for 2 min, because no full batch of samples came. ")
    assert run.states()["learner"]["figures"]["steps"] == 0.0


@pytest.mark.parametrize("name", ["diverged", "collapsed"])
def test_an_accuracy_from_before_a_fault_does_not_improve_the_answer(name: str) -> None:
    run = Run()
    run.probes(0.43)
    run.pass_(120, run.sends(), run.learns())
    run.probes(0.44)
    FAULTS[name][0](run)
    learning = asked(run)["Learning"]
    assert learning.level == "bad"
    assert learning.says.endswith("kNN of held-out images was 44 % (chance 10 %).")
    assert "up" not in learning.says.replace("updates", "")
    assert "Loss" not in learning.says


@pytest.mark.parametrize(
    ("age", "told"),
    [
        (14.0, "is 14 s old, and younger than the condition, which began 41 s ago."),
        (90.0, "is 2 min old; the condition began 41 s ago."),
    ],
)
def test_the_remedy_compares_the_age_of_the_checkpoint_with_the_fault(
    age: float, told: str
) -> None:
    problem = {
        "name": "collapse",
        "producer": "",
        "severity": "critical",
        "says": "",
        "since": 59.0,
    }
    learner = {"now": 100.0, "conditions": [], "facts": {"checkpoint": {"age": age}}}
    assert _remedy(problem | {"remedy": "Go back."}, learner).endswith(told)


def test_the_remedy_depends_on_the_existing_checkpoints() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns())
    collapsed(run)
    says = asked(run)["To do"].says
    assert says.startswith(
        "First, collapse: Stop the run, lower optimiser.learning_rate, and begin"
    )
    assert says.endswith("no checkpoint exists to go back to.")
    run.learner.learner.of_checkpoints.resumed(5, run.learner.wall - 600)
    says = asked(run)["To do"].says
    assert "go back to an earlier checkpoint" in says
    assert "The newest checkpoint is 10 min old" in says
    run = Run()
    diverged(run)
    assert "No checkpoint exists, so it begins with new weights" in asked(run)["To do"].says
    run.learner.learner.of_checkpoints.resumed(5, run.learner.wall - 600)
    assert "The newest checkpoint is 10 min old. Then: updates-skipped" in asked(run)["To do"].says


def test_each_condition_is_counted_once(healthy: Run) -> None:
    """A condition is present or absent, or only a silent process knows."""
    all_of_them = {"down", *(one.name for one in TABLE)}
    states = healthy.states()
    away = {**states, "learner": {"error": "the learner does not answer"}}
    starved_run = Run()
    starved_run.pass_(60, starved_run.sends(), starved_run.learns())
    starved(starved_run)
    for given, unknown in ((states, 0), (away, 1), (starved_run.states(), 0)):
        found = census(given, problems_of(given))
        names = [*found.present, *found.absent, *found.unknown]
        assert sorted(names) == sorted(all_of_them)
        assert bool(found.unknown) == bool(unknown)
    health = asked(starved_run)["Health"].says
    assert health.startswith("1 condition holds now: everything-dropped (gate, yard).")


def test_each_condition_is_named_by_exactly_one_answer() -> None:
    for fault in (starved, lagging, garbage, camera_gone):
        run = Run()
        run.pass_(60, run.sends(), run.learns())
        fault(run)
        found, problems = asked(run), problems_of(run.states())
        told = " ".join(found[one].says for one in QUESTIONS).lower()
        assert problems
        for name in {one["name"] for one in problems}:
            first, *same = (one for one in problems if one["name"] == name)
            assert told.count(first["says"].lower()) == 1, first
            assert all(one["producer"] in found["Producers"].says for one in same)


def test_both_texts_on_a_producer_give_the_same_share_of_bad_samples() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns())
    garbage(run)
    (worst, *_) = run.facts["learner"].read()["producers"]["worst"]
    assert f"{percent(worst['bad'])} of yard's" in asked(run)["Producers"].says


def test_the_answer_on_the_memory_warns_of_pictures_that_hardly_differ() -> None:
    run = Run()
    stats = replace(STATS, effective_rank=1.2)
    run.learner.learner.of_memories.observe("working", stats, None)
    run.pass_(10, run.sends(), run.learns())
    memory = asked(run)["Memory"]
    assert memory.level == "watch"
    assert memory.says.endswith("The pictures hardly differ for the encoder; look at the mosaic.")


def test_each_level_has_a_word() -> None:
    words = {Answer("Learning", level, "", []).word for level in get_args(Level)}
    assert words == {"good", "look", "bad", "wait", "unknown"}
    words = {Answer("To do", level, "", []).word for level in get_args(Level)}
    assert words == {"nothing", "soon", "now", "wait", "unknown"}


def lagging(run: Run) -> None:
    run.pass_(20, run.sends(), run.learns(lag_seconds=2220.0))


def starved(run: Run) -> None:
    run.pass_(300, run.sends(), run.drops("yard", "gate"))


def camera_gone(run: Run) -> None:
    run.pass_(300, run.sends(10, producer_samples={"gate": 10}), run.learns())


def diverged(run: Run) -> None:
    state = Divergence()

    def work() -> None:
        run.learns(skipped="loss", loss=math.nan)()
        state.skipped_in_a_row += 1
        run.learner.learner.observe_divergence(state)

    run.pass_(240, run.sends(), work)


def collapsed(run: Run) -> None:
    put = run.learner.learner._families.set
    for name, value in (
        ("recent_effective_rank", 1.05),
        ("effective_rank_peak", 4.4),
        ("recent_image_rank", 30.0),
        ("image_rank_peak", 30.0),
    ):
        put(name, value)
    run.pass_(60, run.sends(), run.learns())


FAULTS: dict[str, tuple[Callable[[Run], None], str, str, str, str]] = {
    # (fault, question, level, a part of its answer, the condition to begin with)
    "lagging": (lagging, "Learning", "watch", "The learner is 37 min behind", "lag"),
    "starved by drops": (
        *(starved, "Learning", "watch"),
        "No update for 5 min, because the samples are dropped as near-duplicates",
        "everything-dropped (",
    ),
    "camera gone": (
        *(camera_gone, "Producers", "watch"),
        "yard has sent nothing for",
        "producer-silent (yard)",
    ),
    "garbage sender": (
        *(garbage, "Producers", "watch"),
        "67 % of yard's samples",
        "bad-samples (yard)",
    ),
    "diverged": (
        *(diverged, "Learning", "bad"),
        "24 updates in a row had no finite loss",
        "divergence",
    ),
    "collapsed": (
        *(collapsed, "Learning", "bad"),
        "The embeddings have collapsed: their effective rank is 1.1",
        "collapse",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_its_answer_and_first_in_to_do(name: str) -> None:
    fault, question, level, says, first = FAULTS[name]
    run = Run()
    run.fills()
    run.pass_(60, run.sends(), run.learns())
    fault(run)
    found = asked(run)
    assert found[question].level == level
    assert says in found[question].says
    assert found["Health"].level in ("watch", "bad")
    assert found["To do"].says.startswith(f"First, {first}")
    condition = first.partition(" ")[0]
    assert found["To do"].links[0] == (condition, f"runbooks/{condition}")
    assert (condition, f"runbooks/{condition}") in found["Health"].links
    if name == "garbage sender":
        assert "67 % of yard's samples" in found["Producers"].says


def test_a_watched_folder_without_new_files_needs_no_attention() -> None:
    run = Run()
    run.fills()
    both = {"yard": 1.0, "gate": 1.0}
    watches = {"producer_sporadic": both, "producer_finished": dict.fromkeys(both, 0.0)}
    run.pass_(60, run.sends(**watches), run.learns())
    run.pass_(300, run.nothing())
    found = asked(run)
    why = "he sources have nothing new, which is normal for them."
    assert found["Learning"].level == found["Producers"].level == found["To do"].level == "good"
    assert found["Learning"].says.startswith("No update for 5 min, because t" + why)
    assert "T" + why in found["Producers"].says
    assert found["To do"].says == "0 conditions need attention."

    run.learner.learner.observe_journal(9, 0, 0, {}, {})  # records wait that it does not read
    learning = asked(run)["Learning"]
    assert (learning.level, why in learning.says) == ("watch", False)


def test_a_full_disk_is_the_first_thing_to_do(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e7))
    run = Run()
    run.receiver.watch._watched = Watched({"journal": tmp_path})
    run.receiver.receiver._families.watch({"journal": tmp_path})
    run.receiver.health.folders = {"journal": tmp_path}
    run.receiver.health.set("journal", False, "no space left")
    run.receiver.health.set("credit", False, "no producer may send: the disk is full")
    run.pass_(90, run.nothing(credit=0))
    found = asked(run)
    assert found["Learning"].says.endswith(" after the start, because no producer may send.")
    assert found["Producers"].level == "watch"
    assert "For 1 min, no producer may send: the disk is full." in found["Producers"].says
    assert found["Health"].level == "bad"
    says = found["Health"].says
    assert says.startswith("3 conditions hold now: journal-failing (the journal cannot be written")
    assert ", disk-low (50 MB are left on the disk" in says
    assert says.endswith(", no-credit."), "the producers' answer has its sentence"
    assert found["To do"].says.endswith(
        f"Then: disk-low (see {tmp_path}), no-credit (see {tmp_path})."
    )
    assert found["To do"].says.startswith(
        f"First, journal-failing: Make room on the disk of {tmp_path}, repair"
    )
    run.receiver.health.set("journal", True)
    run.receiver.health.set("credit", True)
    run.pass_(30, run.sends())
    found = asked(run)
    assert found["Health"].level == "watch", "the critical ones have ended"
    assert found["Health"].says.startswith("1 condition holds now: disk-low")
    assert "2 conditions ended less than a minute ago: journal-failing (" in found["Health"].says
    assert found["To do"].says.startswith("First, disk-low: ")
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e11))
    run.pass_(20, run.sends())
    found = asked(run)
    assert found["Health"].level == "watch"
    assert "now" not in found["Health"].says
    assert (found["To do"].level, found["To do"].says[:8]) == ("wait", "Nothing,")


def test_a_dead_learner_leaves_only_the_answers_of_the_receiver(healthy: Run) -> None:
    error = "the learner does not answer at http://127.0.0.1:9109: timed out"
    found = asked(healthy, learner={"error": error})
    assert (found["Learning"].level, found["Memory"].level) == ("unknown", "unknown")
    assert found["Learning"].says == "The learner does not answer."
    assert found["Producers"].says == (
        "2 producers connected, 2.0 samples/s in the last minute. "
        "The learner, which knows how many of their samples are used, does not answer."
    )
    assert found["Health"].says.startswith("1 condition holds now: down (the learner does not")
    assert found["Health"].says.endswith(" of the others are unknown.")
    assert found["To do"].says.startswith("First, down: Read the end of the learner's log,")
    assert found["To do"].links == [("down", "runbooks/down")]


def test_to_do_considers_that_the_user_stopped_a_silent_run(healthy: Run) -> None:
    gone = {role: f"the {role} does not answer" for role in ("learner", "receiver")}
    found = asked(healthy, **{role: {"error": why} for role, why in gone.items()})
    assert found["To do"].says.startswith(
        "First, down: If you stopped the run, continue it with stream-ssl run CONFIG. "
        "Otherwise: Read the end of the"
    )


def test_a_memory_full_of_near_duplicates_is_not_good() -> None:
    run = Run()
    run.fills(alike=0.8)
    run.pass_(10, run.sends(), run.learns())
    memory = asked(run)["Memory"]
    assert memory.level == "watch", "as the condition near-duplicates, which begins later"
    assert memory.says.startswith("1,000 of 1,024 slots filled, 80 % near-duplicates.")
    run.fills(alike=0.2)
    run.pass_(10, run.sends(), run.learns())
    assert asked(run)["Memory"].level == "watch"


def test_a_run_without_an_answer_is_bad() -> None:
    error = {"error": "no receiver has started in this run folder"}
    found = {one.question: one for one in answers({"receiver": error})}
    assert {one.level for one in found.values()} == {"bad", "unknown"}
    assert len(problems_of({"receiver": error})) == 1


def test_a_problem_of_one_of_several_receivers_names_the_receiver() -> None:
    full = {"name": "no-credit", "producer": "", "severity": "warning", "says": "the disk is full"}
    (alone,) = problems_of({"receiver": {"problems": [full]}, "learner": {}})
    assert alone["says"] == "the disk is full"
    (found,) = problems_of({"receiver-0": {}, "receiver-1": {"problems": [full]}, "learner": {}})
    assert found["says"] == "receiver-1: the disk is full"


def test_advice_on_folders_has_their_paths(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e7))
    run, folders = Run(), {"checkpoints": tmp_path / "c", "quarantine": tmp_path / "q"}
    for world, metrics in (
        (run.learner, run.learner.learner),
        (run.receiver, run.receiver.receiver),
    ):
        world.watch._watched = Watched(folders)
        world.health.folders = folders
        metrics._families.watch(folders)
    run.pass_(60, run.sends(), run.learns())
    first = f"First, disk-low: Make room on the disk of {tmp_path / 'c'}, or lower"
    assert asked(run)["To do"].says.startswith(first)
    garbage(run)
    (bad,) = (one for one in problems_of(run.states()) if one["name"] == "bad-samples")
    assert f"Read the reasons in {tmp_path / 'q'}: a .json file" in bad["remedy"]
    assert asked(run)["To do"].says.endswith(f"Then: bad-samples (see {tmp_path / 'q'}).")
