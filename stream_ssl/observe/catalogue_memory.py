"""The catalogue's part on memories: the working one and its shadows, told apart by a label."""

from __future__ import annotations

from stream_ssl.observe.spec import Spec

MEMORIES: tuple[Spec, ...] = (
    Spec(
        "learner", "gauge", "memory_slots", "slots", "Slots that are filled.",
        "Reaches the capacity after as many samples, and stays.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_capacity_slots", "slots", "Slots that the memory has.",
        "Constant.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_inserted_total", "samples",
        "Samples written to a slot.",
        "The rate against that of trained samples: the turnover.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_evictions_total", "samples",
        "Samples evicted from their slot.", "As memory_inserted_total once the memory is full.",
        ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_refused_total", "samples",
        "Samples that were not written, since they would have been the most duplicated.",
        "Only eviction policies that may refuse a newcomer.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_near_duplicates_total", "samples",
        "Samples found near-duplicates of a held one at admission, whether let in or not.",
        "The rate against that of trained samples: the share of the stream that says nothing new. "
        "0 where the memory's `duplicates` is not set.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_merged_total", "samples",
        "Near-duplicates merged into the slot that they resemble; each was refused too.",
        "Less than memory_near_duplicates_total, or equal to it with action merge.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_age_samples", "samples",
        "Age of the slots in samples added since each was born, by percentile.",
        "100 that grows without end: slots that nothing ever evicts, noise perhaps.",
        ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_staleness_samples", "samples",
        "Samples added since the embedding of each slot was computed, by percentile.",
        "As memory_age_samples: nothing is encoded anew. 100 far above 90: some slots never are.",
        ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_reencoding_shift", "",
        "1 - cosine of old and new embedding of the slots last encoded anew, mean and largest; 0 "
        "before any.",
        "Large: the encoder moves faster than the memory is kept fresh; encode more slots a step.",
        ("memory", "statistic"),
    ),
    Spec(
        "learner", "gauge", "memory_turnover_ratio", "ratio",
        "Share of the slots whose sample is among the last offered, as many as the memory has "
        "slots; 1 for a queue.",
        "Towards 0: the memory is frozen, newcomers are refused or evict each other.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates", "samples",
        "Expected number of duplicates of a slot in its memory, N(j), by percentile; by the same "
        "score as memory_expected_collisions.",
        "100 far above 50: one class or scene still crowds the memory.", ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates_mean", "samples",
        "Mean expected number of duplicates of a slot in its memory.",
        "Falls below that of a queue beside it.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_counted_slots", "slots",
        "Slots that memory_slot_duplicates and memory_expected_collisions are taken over.",
        "Less than memory_slots: the memory is too large to count, they are an even sample.",
        ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_multiplicity_mean", "samples",
        "Mean number of samples that a slot stands for: itself and those merged into it.",
        "1 unless near-duplicates are merged; growth: the stream repeats itself.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_lost_images", "slots",
        "Slots whose image the memory's image file no longer has.",
        "Above 0 only after a crash, and falling as newcomers take the slots over.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_expected_collisions", "",
        "Mean expected collision probability over the pairs of slots, on the working memory's "
        "descriptor, by the score of the memory's policy; by the working memory's where a shadow's "
        "policy has none.",
        "Falls below that of a queue beside it.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_effective_classes", "classes",
        "Effective number of classes of a memory, from the spectrum of its embeddings.",
        "Above stream_effective_classes.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_class_slots", "slots", "Labelled slots, by class.",
        "The share of the most frequent class, against that of the stream.", ("memory", "class"),
    ),
    Spec(
        "learner", "gauge", "memory_class_entropy_nats", "nats",
        "Entropy of the class labels of a memory; log(classes) when balanced.",
        "Higher than that of a queue beside it.", ("memory",),
    ),
)  # fmt: skip
