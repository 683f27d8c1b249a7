"""The metrics of the learner's memories: admissions, slots, classes and producers."""

from __future__ import annotations

from collections import Counter as Counting
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stream_ssl.observe.catalogue import EXTREMES, PERCENTILES
from stream_ssl.observe.families import OTHER, Families, class_label

if TYPE_CHECKING:
    from stream_ssl.memory import Admission, MemoryStats
    from stream_ssl.memory.shares import Holding


class MemoryMetrics:
    """The metrics of a learner's working memory and of its shadows."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._classes_held: dict[str, set[str]] = {}
        self._holders: set[str] = set()  # producers that held slots at the last report

    def admitted(self, memory: str, admission: Admission) -> None:
        """Count the result of a shadow's `consume`.

        `LearnerMetrics.consume` counts the admissions of the working memory.
        """
        add = self._families.add
        add("memory_inserted_total", admission.inserted, memory=memory)
        add("memory_evictions_total", len(admission.evicted), memory=memory)
        add("memory_refused_total", len(admission.refused), memory=memory)
        add("memory_near_duplicates_total", len(admission.duplicates), memory=memory)
        add("memory_merged_total", len(admission.merged), memory=memory)

    def observe(
        self, memory: str, stats: MemoryStats, class_counts: Mapping[int, int] | None = None
    ) -> None:
        """Report the state of a memory.

        `WorkingMemory.stats` makes an eigendecomposition, so do not call it at every step.

        Args:
            memory: a name from `memories` of `LearnerMetrics`.
            class_counts: labelled slots by class, from `balance.class_counts`. Classes that left
                the memory become 0.
        """
        put = self._families.set
        self._families.fill(stats, memory=memory)
        percentiles = {
            "memory_age_samples": (stats.age_p50, stats.age_p90, stats.age_max),
            "memory_staleness_samples": (stats.stale_p50, stats.stale_p90, stats.stale_max),
            "memory_slot_duplicates": (stats.count_p50, stats.count_p90, stats.count_max),
        }
        for metric, of_slots in percentiles.items():
            for percentile, value in zip(PERCENTILES, of_slots, strict=True):
                put(metric, value, memory=memory, percentile=percentile)
        shifts = (1 - stats.drift_mean, 1 - stats.drift_min)
        for statistic, shift in zip(EXTREMES, shifts, strict=True):
            put("memory_reencoding_shift", shift, memory=memory, statistic=statistic)
        if class_counts is not None:
            self._class_slots(memory, class_counts)

    def observe_producers(self, holdings: Mapping[str | None, Holding]) -> None:
        """Report the slots of each producer, from `WorkingMemory.holdings`.

        Producers that no longer hold slots become 0.
        """
        slots, guaranteed = (Counting(dict.fromkeys(self._holders, 0)) for _ in range(2))
        for producer, holding in holdings.items():
            label = OTHER if producer is None else producer
            label = self._families.fold("producer_slots", "producer", label)
            slots[label] += holding.slots
            guaranteed[label] += holding.guaranteed
        self._holders = set(slots)
        for label in slots:
            self._families.set("producer_slots", slots[label], producer=label)
            self._families.set("producer_guaranteed_slots", guaranteed[label], producer=label)

    def _class_slots(self, memory: str, counts: Mapping[int, int]) -> None:
        # Imported here, because the receiver's process has no torch.
        from stream_ssl.observe.balance import entropy

        folded = dict.fromkeys(self._classes_held.get(memory, ()), 0)  # classes that left are 0
        for label, slots in counts.items():
            folded[class_label(label)] = folded.get(class_label(label), 0) + slots
        self._classes_held[memory] = {label for label, slots in folded.items() if slots}
        for name, slots in folded.items():
            self._families.set("memory_class_slots", slots, **{"memory": memory, "class": name})
        self._families.set("memory_class_entropy_nats", entropy(counts.values()), memory=memory)
