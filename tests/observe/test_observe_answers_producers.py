"""The answers on producers, on the states of real metrics, health and watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers_world import Run, asked, garbage, healthy_run, origins

from stream_ssl.observe.answers import answers


@pytest.fixture(scope="module")
def healthy() -> Run:
    return healthy_run()


def test_the_answer_combines_the_use_of_producers_on_all_ranks() -> None:
    """Each rank tests its part of the samples, and may read another journal."""
    run = Run()
    run.pass_(60, run.sends(), run.learns())
    states = run.states()

    def row(name: str, samples: float, used: float) -> dict[str, Any]:
        return {"name": name, "samples": samples, "used": used, "dropped": 1 - used, "bad": 0.0}

    for name, best, worst in (
        ("learner", row("yard", 300, 0.9), []),
        ("learner-1", row("yard", 100, 0.5), [row("gate", 50, 0.0)]),
    ):
        uses = {"best": best, "worst": worst, "samples": 300.0, "dropped": 30.0}
        facts = {**states["learner"]["facts"], "producers": uses}
        states[name] = {**states["learner"], "facts": facts}
    says = {one.question: one.says for one in answers(states)}["Producers"]
    assert "yard, 80 % of its samples are used. Worst: gate (0 % used, 100 % near-dup" in says


def test_the_uses_of_each_producer_are_listed_by_reason() -> None:
    run = Run()
    run.fills()
    run.pass_(10, run.learns(), run.drops("yard"))
    run.learner.learner.observe_journal(0, 0, 0, {("damaged", "yard"): 7}, {})
    uses = run.facts["learner"].uses()
    assert uses["yard"] == {
        "admitted": 10,
        "dropped": {"near_duplicate": 30},
        "bad": {"damaged": 7},
        "slots": 300,
        "guaranteed": 170,
    }
    assert (uses["gate"]["dropped"], uses["gate"]["slots"]) == ({}, 700)


def test_producers_that_have_left_have_no_rate(healthy: Run) -> None:
    receiver = healthy.states()["receiver"]
    left = {**receiver, "figures": {**receiver["figures"], "producers": 0.0}}
    assert left["figures"]["received"] == 2.0, "a mean of the seconds before"
    found = asked(healthy, receiver=left)
    start = "No producer is connected. In the last 10 min, each producer"
    assert found["Producers"].says.startswith(start)
    # A condition begins when nobody has been connected for a while.
    assert (found["Producers"].level, found["To do"].level) == ("wait", "wait")
    assert found["To do"].says.startswith("Start a producer: stream-ssl produce")


def test_sources_that_have_ended_do_not_count_as_a_fault() -> None:
    run = Run()
    run.fills()
    run.pass_(300, run.sends(), run.learns())
    ended = {"producer_finished": {"yard": 2.0, "gate": 2.0}, "producers": 0}
    run.learner.learner._families.set("pending_samples", 5)
    run.pass_(180, run.nothing(**ended))
    found = asked(run)
    assert {one.level for one in found.values()} == {"good"}
    told = "No producer is connected. The last, yard, ended normally; its last sample came at 19"
    assert found["Producers"].says.startswith(told)
    told = "because every source has ended. The learner has read all samples, and 5 samples wait"
    assert told in found["Learning"].says
    assert "Every source has ended: send more, or stop the run" in found["To do"].says
    run.pass_(10, run.nothing(**{**ended, "producer_finished": {"film": 1.0}}))  # sent nothing
    assert "because every source has ended" not in asked(run)["Learning"].says
    run.pass_(10, run.nothing(**{**ended, "producer_finished": {"film": 2.0}}))
    assert "because every source has ended" in asked(run)["Learning"].says
    run.pass_(180, run.nothing(**{**ended, "producer_finished": {"yard": 1.0}}))
    assert asked(run)["Producers"].says.startswith("No producer is connected. In the last")
    assert "no-producers" in asked(run)["Health"].says


def test_a_learner_that_has_just_started_does_not_claim_to_have_read_all_samples() -> None:
    run = Run()
    run.pass_(10, run.sends())
    over = run.nothing(producers=0, producer_finished={"yard": 2.0, "gate": 2.0})
    run.pass_(10, over)
    found = asked(run)
    assert found["Learning"].level == found["Memory"].level == "wait"
    assert "has read all samples" not in found["Learning"].says
    assert found["Memory"].says == "The learner has not counted its slots yet."
    assert "stop the run" not in found["To do"].says
    run.fills()
    run.pass_(10, over)
    found = asked(run)
    assert "has read all samples" in found["Learning"].says
    assert "stop the run" in found["To do"].says


def test_the_answer_sums_the_producers_of_several_receivers(healthy: Run) -> None:
    states = healthy.states()
    twin = {"receiver-0": states["receiver"], "receiver-1": states["receiver"]}
    (producers,) = (
        one
        for one in answers({**twin, "learner": states["learner"]})
        if one.question == "Producers"
    )
    assert producers.says.startswith("4 producers connected, 4.0 samples/s in the last")


def test_sources_count_as_ended_beside_a_receiver_without_producers() -> None:
    run, other = Run(), Run()
    run.fills()
    run.pass_(300, run.sends(), run.learns())
    ended = {"producer_finished": {"yard": 2.0, "gate": 2.0}, "producers": 0}
    run.pass_(180, run.nothing(**ended))
    for nothing, level in (
        ({"producers": 0}, "good"),
        ({"producers": 0, "producer_finished": {"film": 0.0}}, "wait"),  # was killed
    ):
        other.pass_(10, other.nothing(**nothing))
        states = run.states()
        both = {"receiver-0": states["receiver"], "receiver-1": other.states()["receiver"]}
        found = {one.question: one for one in answers({**both, "learner": states["learner"]})}
        assert found["Producers"].level == level
        assert ("yard, ended normally" in found["Producers"].says) == (level == "good")


def test_a_producer_without_use_is_named_before_its_condition_holds() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns(origins_B=None), run.drops("yard"), gate_alone(run))
    found = asked(run)
    assert (found["Health"].level, found["Producers"].level) == ("good", "watch")
    assert "Worst: yard (0 % used, 100 % near-duplicates)." in found["Producers"].says
    assert found["To do"].level == "watch"
    assert found["To do"].says.startswith("yard shows nothing new. Point the camera")
    run.fills()
    run.pass_(10, run.nothing(producers=0, producer_finished={"yard": 2.0, "gate": 2.0}))
    found = asked(run)
    assert "Worst: yard (0 % used, 100 % near-duplicates)." in found["Producers"].says
    assert found["Producers"].level == "good"
    assert "Point the camera" not in found["To do"].says  # nobody can, once a source has ended


def test_the_answer_names_a_few_of_many_producers_without_use() -> None:
    run = Run()
    lobbies = [f"lobby-{number}" for number in range(8)]
    run.pass_(60, run.sends(), gate_alone(run), run.drops(*lobbies))
    found = asked(run)
    told = "lobby-0, lobby-1, lobby-2, lobby-3, lobby-4 and 3 more"
    assert found["Producers"].says.endswith(
        f"Worst: {told} (less than 10 % used, near-duplicates)."
    )
    assert found["To do"].says.startswith(f"{told} show nothing new.")
    run.pass_(120, run.sends(), gate_alone(run), run.drops(*lobbies))
    found = asked(run)
    assert found["Producers"].says.count("dropped as near-duplicates") == 1
    named = "lobby-1, lobby-2, lobby-3, lobby-4"
    assert f"The same condition holds for {named}, lobby-5 and 2 more." in found["Producers"].says
    assert f"everything-dropped (lobby-0, {named} and 3 more)" in found["Health"].says
    assert f"everything-dropped (lobby-0, {named} and 3 more):" in found["To do"].says


def test_a_producer_that_is_better_than_a_faulty_one_is_not_named_the_worst() -> None:
    run, used = Run(), origins("gate", 10) + origins("hall", 10)
    run.pass_(60, run.sends(), run.learns(origins_B=used, dropped_origins=origins("hall", 4)))
    assert "Worst: hall (71 % used" in asked(run)["Producers"].says
    garbage(run)
    told = asked(run)["Producers"].says
    assert "of yard's samples within" in told
    assert "Worst" not in told


def test_a_single_producer_is_neither_the_best_nor_the_worst() -> None:
    run = Run()
    run.pass_(60, run.sends(), gate_alone(run))
    assert asked(run)["Producers"].says.endswith(
        "In the last 1 min, 100 % of gate's samples are used."
    )


def test_samples_that_wait_for_the_near_duplicate_test_change_no_share() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns(), run.drops("yard"))
    before = asked(run)["Producers"].says
    assert "Best of the last 1 min: gate, 100 % of its samples are used." in before
    run.learner.learner.observe_journal(0, 900, 0, {}, {"yard": 5000, "gate": 5000})
    run.pass_(10, run.sends(), run.learns(), run.drops("yard"))
    assert asked(run)["Producers"].says == before


def test_the_worst_of_equals_is_not_named() -> None:
    run = Run()
    lobbies = ("lobby-0", "lobby-1")
    run.pass_(180, run.sends(), run.learns(), run.drops(*lobbies))
    found = asked(run)
    assert "Worst" not in found["Producers"].says
    assert "The same condition holds for lobby-1." in found["Producers"].says
    two_ranks = asked(run, **{"learner-1": run.states()["learner"]})
    for question in ("Producers", "To do"):
        assert two_ranks[question].says == found[question].says, "each producer is named once"


def test_the_answer_names_producers_that_did_not_end_normally() -> None:
    run = Run()
    run.pass_(60, run.sends(), run.learns(), run.drops("yard", "gate"))
    run.pass_(120, run.nothing(producers=0))
    found = asked(run)
    assert "; gate, yard did not end normally." in found["Producers"].says
    assert "No update for 2 min, because no producer is connected." in found["Learning"].says


def gate_alone(run: Run) -> Callable[[], None]:
    return run.learns(origins_B=origins("gate", 20))
