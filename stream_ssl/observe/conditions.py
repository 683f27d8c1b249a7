"""The conditions of a run that need attention: thresholds and texts.

The page, `stream-ssl status`, /readyz, the log and the alerts all use this table. `watch.py`
decides which conditions are present.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stream_ssl.observe.metric_spec import Role

Severity = Literal["warning", "critical"]

HOLD_SECONDS = 60.0
"""Seconds that a condition must be absent before it ends, so that it does not flap."""

# -- thresholds

LAG_SECONDS = 600.0
LAG_GROWS_SECONDS = 600.0
"""A lag that has grown in each minute of this time counts, too, ..."""
LAG_GROWN_SECONDS = 60.0
"""... if it is more than this."""
GAPS = 20.0
"""A producer is silent if it has sent nothing for this many of its usual gaps, ..."""
SILENT_SECONDS = 60.0
"""... and for at least this long."""
UNKNOWN_GAP_SECONDS = 100.0
"""The limit for a producer that has sent too little to have a usual gap."""
NO_PRODUCER_SECONDS = 90.0
NO_CREDIT_SECONDS = 60.0
BAD_SHARE, BAD_SAMPLES, BAD_SECONDS = 0.01, 3, 600.0
"""Bad samples: more than this share, and at least this number, within this many seconds."""
BAD_DEVIATIONS = 2.0
"""The number must also exceed the share by this many standard deviations of a Poisson count. Three
bad samples of the first 270 are no news from a crawl with 0.6 % of them."""
DROPPED_SHARE, DROPPED_SAMPLES, DROPPED_SECONDS = 0.99, 20, 100.0
"""Near-duplicates: at least this share, and at least this number, within this many seconds."""
STUCK_SECONDS = 90.0
SKIPPED_IN_A_ROW = 20
SKIPPED_IN_AN_HOUR = 10
RANK_SHARE = 0.2
"""Collapse: the effective rank, minus 1, is below this share of its recent maximum, minus 1, ..."""
IMAGE_SHARE = 0.7
"""... while the rank of the images is above this share of its own maximum, ..."""
COLLAPSE_SECONDS = 30.0
"""... for this many seconds."""
COLLAPSED_RANK = 1.5
"""An effective rank below this is also a collapse, if it lasts for COLLAPSED_SECONDS."""
COLLAPSED_SECONDS = 240.0
FLAT_SHARE, FLAT_GRADIENT, FLAT_CHANGE = 0.15, 0.05, 0.008
"""An encoder does not learn if two things are true. The effective rank of its embeddings, minus 1,
is below FLAT_SHARE of the rank of the images, minus 1. The norm of the gradient is below
FLAT_GRADIENT, or an update changes the weights by more than FLAT_CHANGE of their norm.

These values were measured after 60 updates on CIFAR-10, on a patrol's frames and on video; see
docs/numbers.md. Learning rates of 0.03 to 10 had shares of 0.01 to 0.12, with norms below 0.03 or
changes of 0.009 and more. Healthy runs had norms of 0.37 and more, changes of 0.0003 to 0.0057,
and shares of 0.05 to 0.48."""
OTHER_CHANGE = 0.05
"""An encoder does not learn either if an update changes the weights by more than this part of their
norm, whatever the ranks are. Each update then makes another encoder, and keys of several encoders
have a high rank together. With SimCLR and SimSiam, runs at learning rates of 10 and 100 changed
their weights by 0.08 to 0.36, and their rank shares were up to 1.1."""
FLAT_UPDATES, WILD_UPDATES, FLAT_SECONDS = 10, 50, 30.0
"""A small gradient counts after FLAT_UPDATES updates of this process, and a large change after
WILD_UPDATES. A rule must then hold for FLAT_SECONDS. Large changes need more updates, because the
first 20 updates at a good rate of 0.003 change the weights by 0.012 each."""
ONE_PICTURE_RANK, ONE_PICTURE_COPIES, ONE_PICTURE_SECONDS = 1.05, 0.99, 60.0
"""One picture: the effective rank of the recent images is below ONE_PICTURE_RANK, and the share of
near-duplicate slots is at least ONE_PICTURE_COPIES. Both must last for ONE_PICTURE_SECONDS.

Measured ranks: one picture has 1.00, and 1.01 with noise of 5 levels. Two pictures have 2.0. The
frames of a fixed camera in a street have 1.16."""
HUNG_SECONDS = 60.0
"""A process hangs if it exists and has not answered for this many seconds."""
CHECKPOINT_SECONDS, FIRST_CHECKPOINT_SECONDS = 3600.0, 300.0
"""The least age of unsaved updates that counts, with an older checkpoint and without any. Three
intervals between two checkpoints also have to pass."""
COPY_SECONDS = 1800.0
DISK_BYTES, DISK_CHECKPOINTS, DISK_FILES = 1e9, 2, 1000
CLOCK_SECONDS = 60.0
"""The limit for a jump of this machine's clock, and for its difference to a producer's clock."""
CLOCK_JUMP_SHOWN_SECONDS = 600.0
REFUSED, SILENT_CONNECTIONS, REFUSED_SECONDS = 3, 12, 120.0
"""Refusals for a key, or connections without a message, within this many seconds."""
MISFITS, MISFITS_SECONDS, MISFITS_AGAIN_SECONDS = 6, 600.0, 120.0
"""Refusals for another reason: at least MISFITS within MISFITS_SECONDS. Some must lie in the
last MISFITS_AGAIN_SECONDS and some before, because a port scan takes less time."""
RESTART_SECONDS = 900.0
START_SECONDS = 600.0
SLOW_COMMIT_SHARE, SLOW_COMMITS, SLOW_SECONDS = 0.01, 5, 600.0
EVENT_SECONDS = 3600.0
"""Seconds that single events are shown, such as a damaged segment."""
COLLISION_PROBABILITY, NEAR_DUPLICATE_SHARE, QUALITY_SECONDS = 0.5, 0.5, 1800.0
SLOW_RANK, SLOW_RANK_BUSY, SLOW_RANK_SECONDS = 1.5, 0.1, 900.0
"""A slow rank is busy SLOW_RANK times as long as the others, and for at least SLOW_RANK_BUSY of the
time. While the stream pauses, ranks work a little between two looks, and none waits for a step.
"""
SLOWEST_RANK = 1.1
"""A rank is shown as the slowest if it is busy this many times as long as the fastest rank."""


FOLDERS = {
    "checkpoints": "the checkpoints",
    "full": "the run",
    "journal": "the journal",
    "quarantine": "the run's quarantine folder",
}
"""The names for folders in remedies, where the folder itself is not known, as in an alert.

"full" stands for the folders of a disk that is nearly full."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A fault of a run that needs attention.

    Attributes:
        name: the value of the metric's label, and the file name of the runbook.
        summary: one sentence without figures, for an alert. "{producer}" stands for the producer.
        remedy: the action to take, in one or two sentences. "{journal}" stands for a folder of
            FOLDERS.
        unready: /readyz fails while the condition is present. It is true only if the process itself
            cannot work: a receiver stays in service while a camera is silent.
    """

    name: str
    role: Role
    severity: Severity
    summary: str
    remedy: str
    unready: bool = False

    def advice(self, folders: Mapping[str, object] = FOLDERS) -> str:
        """Return the remedy with the paths of these folders, by the names of FOLDERS."""
        return self.remedy.format_map({**FOLDERS, **folders})

    def where(self, folders: Mapping[str, object]) -> str:
        """Return the folders that the remedy names; "" if it names none, or if none is known."""
        return ", ".join(
            str(folder) for name, folder in folders.items() if f"{{{name}}}" in self.remedy
        )


@dataclass(frozen=True, slots=True)
class PresentCondition:
    """A condition that is present, or was until less than HOLD_SECONDS ago.

    Attributes:
        producer: the producer that it concerns; "" if it concerns none.
        says: a sentence that names the cause, with figures.
        since: the Unix time at which it began.
        remedy: the action to take, with the paths of the process's folders.
        where: the folders that the remedy names, or "".
        over: whether it has ended.
    """

    condition: Condition
    producer: str
    says: str
    since: float
    remedy: str
    where: str = ""
    over: bool = False

    def facts(self) -> dict[str, object]:
        """Return the condition as plain values, for JSON."""
        return {
            **problem(self.condition.name, self.says, self.condition.severity, self.remedy),
            "producer": self.producer,
            "where": self.where,
            "since": round(self.since, 1),
            "over": self.over,
        }


def problem(name: str, says: str, severity: str, remedy: str) -> dict[str, Any]:
    """Return a fault of a process, which concerns no producer, as plain values for JSON."""
    return {
        "name": name,
        "producer": "",
        "severity": severity,
        "says": says,
        "remedy": remedy,
        "where": "",
        "since": None,
        "runbook": f"runbooks/{name}",
    }


TABLE: tuple[Condition, ...] = (
    Condition("starting", "both", "critical",
        "a process has been starting for more than 10 minutes",
        "Read the process's log. It says what the process waits for, such as weights to download.",
    ),
    Condition("restarting", "both", "warning",
        "a process has died and was started again",
        "Read the exit status in the supervisor's log. The lines above it have the reason. After "
        "SIGKILL, look into dmesg for a lack of memory.",
    ),
    Condition("loop-stopped", "both", "critical",
        "the main loop of a process has stopped, though its port answers",
        "After a machine has slept, the condition ends by itself. If it stays, read the process's "
        "log, and restart the process: it continues where it was.",
    ),
    Condition("process-hung", "both", "critical",
        "another process of the run exists and does not answer",
        "`kill -USR1 PID` writes the stacks of its threads to its log. `kill -CONT PID` "
        "wakes a stopped process. Otherwise use `kill -9 PID`: stream-ssl run starts the "
        "process again, and nothing is lost.",
    ),
    Condition("disk-low", "both", "warning",
        "a disk that the run writes to is nearly full",
        "Make room on the disk of {full}, or lower checkpoints.keep or journal.budget.",
    ),
    Condition("journal-damaged", "both", "critical",
        "a part of the journal is damaged",
        "The damaged records are left out. Check the disk.",
    ),
    Condition("no-producers", "receiver", "warning",
        "no producer is connected, so nothing is received",
        "Start the producers, or check that they use this receiver's address and keys.",
    ),
    Condition("nothing-received", "receiver", "warning",
        "producers are connected, but none of them sends",
        "Look at the producers' logs and at their cameras or sources.",
    ),
    Condition("producer-silent", "receiver", "warning",
        "{producer} has sent nothing for longer than 20 times its usual gap",
        "Look at the log of this producer and at its camera or source. A producer that ends "
        "normally is not expected to send.",
    ),
    Condition("no-credit", "receiver", "warning",
        "no producer may send, because the journal or its disk is full, or the learner is behind",
        "If the disk of {journal} is full, make room. If the learner runs and is too far behind, "
        "lower pace.updates_per_sample, or begin a new run with a smaller encoder. If it "
        "only pauses too long, raise journal.budget. Otherwise check that it runs and saves "
        "checkpoints.",
    ),
    Condition("journal-failing", "receiver", "critical",
        "the journal cannot be written",
        "Make room on the disk of {journal}, repair it, or put the folder back. Nothing that was "
        "acknowledged is lost.",
    ),
    Condition("missing-packets", "receiver", "critical",
        "the journal lacks packets that were acknowledged",
        "The journal was lost or replaced. Put it back, or accept the loss.",
    ),
    Condition("slow-disk", "receiver", "warning",
        "more than 1 % of the commits to the journal take longer than 0.25 s",
        "Look for a failing disk, or for other programs that write to it.",
    ),
    Condition("refusals", "receiver", "warning",
        "connections or messages are refused, because of a key or because they are invalid",
        "Put the producer's key on the allow-list, or stop the producer whose key was "
        "revoked. Restart producers where `access` of the run changed. Upgrade producers "
        "of another version.",
    ),
    Condition("allow-list", "receiver", "warning",
        "the allow-list cannot be read, and the previous list stays in force",
        "Repair or restore the file. Until then, changes of the list have no effect, so "
        "revoked keys are still admitted.",
    ),
    Condition("rejected-samples", "receiver", "warning",
        "more than 1 % of {producer}'s samples are refused by the receiver",
        "Read the reason in the producer's log, and correct what the producer sends.",
    ),
    Condition("clock", "receiver", "warning",
        "a clock is wrong: this machine's clock jumped, or it differs from {producer}'s clock",
        "Set the clocks of this machine and of the producer by NTP.",
    ),
    Condition("lag", "learner", "warning",
        "the learner is more than 10 minutes behind the stream, or falls further behind",
        "After a bulk upload, wait: the lag ends once the learner has read it. Otherwise give the "
        "learner more workers or a GPU, lower pace.updates_per_sample, send less, or begin a new "
        "run with a smaller encoder.",
    ),
    Condition("learner-stuck", "learner", "critical",
        "samples wait, and the learner trains on none of them",
        "Read the learner's log, then restart the learner. It continues from its checkpoint.",
    ),
    Condition("divergence", "learner", "critical",
        "the updates have no finite loss or gradient, so the encoder learns nothing",
        "Lower optimiser.learning_rate or set optimiser.clip, and restart the learner.",
    ),
    Condition("learner-halted", "learner", "critical",
        "the learner has stopped taking samples, because its updates diverged again and again",
        "Lower optimiser.learning_rate or set optimiser.clip, and restart the learner.",
        unready=True,
    ),
    Condition("updates-skipped", "learner", "warning",
        "more than 10 updates within an hour were skipped, because loss, gradient or keys "
        "were not usable",
        "Lower optimiser.learning_rate, or set optimiser.clip.",
    ),
    Condition("collapse", "learner", "critical",
        "the embeddings have collapsed: the encoder hardly distinguishes samples any more",
        "Stop the run, go back to an earlier checkpoint, and lower optimiser.learning_rate.",
    ),
    Condition("not-learning", "learner", "critical",
        "the encoder does not learn: its updates are too large, or its gradient is nearly 0 and "
        "its embeddings hardly differ",
        "Lower optimiser.learning_rate (0.001 suits Adam), and a temperature of the loss above 1. "
        "Then begin a new run, or go back to an earlier checkpoint, because these weights seldom "
        "recover.",
    ),
    Condition("one-picture", "learner", "critical",
        "the stream shows one picture over and over, so the encoder learns nothing",
        "Check whether a camera hangs or is covered, or whether a source repeats one file. Set "
        "learner.novelty to auto, which drops repeated pictures.",
    ),
    Condition("everything-dropped", "learner", "warning",
        "at least 99 % of {producer}'s samples are dropped as near-duplicates",
        "Point the camera at something that changes, or send fewer frames. Keep "
        "learner.novelty on: without it, one picture fills the memory.",
    ),
    Condition("bad-samples", "learner", "warning",
        "more than 1 % of {producer}'s samples cannot be decoded",
        "Read the reasons in {quarantine}: a .json file is beside each sample. Then correct the "
        "source of the samples.",
    ),
    Condition("checkpoint-old", "learner", "critical",
        "old updates are in no checkpoint",
        "Read the reason in the learner's log, and remove it. Until then, the journal is "
        "not trimmed.",
    ),
    Condition("checkpoint-failing", "learner", "critical",
        "a checkpoint could not be written",
        "Make room on the disk of {checkpoints}, or repair it. The previous checkpoint is intact.",
    ),
    Condition("checkpoint-damaged", "learner", "warning",
        "a checkpoint is damaged and was renamed to damaged-*",
        "The run continued from an older one, or with new weights if none was whole: see its step. "
        "Check the disk. Remove damaged-* from {checkpoints} to end this condition.",
    ),
    Condition("not-kept", "learner", "warning",
        "samples could not be written to the run's folder of originals or to its quarantine",
        "Read the reason in the learner's log. Make room on the disk, or correct the owner and the "
        "rights of these folders. The samples are learned from as usual.",
    ),
    Condition("copies-late", "learner", "warning",
        "no checkpoint could be copied to the bucket for more than 30 minutes",
        "Read the reason in the learner's log. The checkpoints of the run's folder are intact.",
    ),
    Condition("collisions", "learner", "warning",
        "a sample and a slot of the memory share a class with a probability above 0.5",
        "Find the class that crowds the memory in stream_ssl_memory_class_slots. Choose "
        "a loss of the debiased family (docs/losses.md).",
    ),
    Condition("near-duplicates", "learner", "warning",
        "more than half of the memory's slots are near-duplicates of others",
        "Look at the copies on the page. If learner.novelty is not auto, set it. Or lower the "
        "rate of the camera that shows nothing new.",
    ),
    Condition("drift", "learner", "warning",
        "the stream shows different things than before",
        "Check whether a source was added, removed, covered or turned. If you intended "
        "the change, do nothing.",
    ),
    Condition("slow-rank", "learner", "warning",
        "one rank needs longer for each step than the others, which wait for it",
        "Look at the machine of that rank. The slowest rank sets the speed of the group.",
    ),
    Condition("parked-journal", "learner", "warning",
        "no rank reads some of the run's journals",
        "Start the group with the hosts that have these journals, or list lost journals "
        "in ranks.lost.",
    ),
)  # fmt: skip

CONDITIONS = {condition.name: condition for condition in TABLE}

OF_CHECK = {
    "receiver": "loop-stopped",
    "learner": "loop-stopped",
    "journal": "journal-failing",
    "credit": "no-credit",
    "cursor": "disk-low",
    "checkpoint": "checkpoint-failing",
}
"""The condition of each loop and of each readiness check."""

DOWN = (
    "Read the end of the process's log, which is the output of stream-ssl run or the journal of "
    "its systemd unit. Then start the process again. No sample is lost: the journal keeps "
    "acknowledged samples, and producers keep the others."
)
"""The remedy for a process that does not answer."""


def conditions_of(role: Role) -> tuple[Condition, ...]:
    """Return the conditions that a process of this role watches."""
    return tuple(one for one in TABLE if one.role in (role, "both"))


def hung_remedy(says: str) -> str:
    """Return the remedy of process-hung, with the process ids that the sentence names."""
    pids = re.findall(r"\(pid (\d+)\)", says)
    return CONDITIONS["process-hung"].remedy.replace("PID", " ".join(pids) or "PID")
