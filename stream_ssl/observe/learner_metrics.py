"""The catalogue's entries for metrics that only the learner exports."""

from __future__ import annotations

from stream_ssl.observe.metric_spec import Spec

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHECKPOINT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

LEARNER: tuple[Spec, ...] = (
    # -- learner: the loop
    Spec(
        "learner", "counter", "steps_total", "steps",
        "Updates of the weights since this process started.", "The rate; 0 while lag grows: stuck.",
    ),
    Spec(
        "learner", "counter", "trained_samples_total", "samples",
        "Fresh samples of steps that updated the weights, since this process started.",
        "The rate, with those of near_duplicates_total and skipped_samples_total, against that of "
        "received_samples_total.",
    ),
    Spec(
        "learner", "counter", "skipped_samples_total", "samples",
        "Fresh samples of steps that made no update, by the reasons of skipped_updates_total.",
        "Any reason but pace: these samples taught the encoder nothing.", ("reason",),
    ),
    Spec(
        "learner", "counter", "near_duplicates_total", "samples",
        "Samples of the journal dropped as near-duplicates, before they were encoded.",
        "Its share of the stream: encodings and updates that novelty saves.",
        field="StepRecord.near_duplicates",
    ),
    Spec(
        "learner", "counter", "producer_admitted_samples_total", "samples",
        "Fresh samples that were not dropped and reached a step, by producer.",
        "Against dropped_samples_total.", ("producer",),
    ),
    Spec(
        "learner", "counter", "dropped_samples_total", "samples",
        "Samples dropped before they were encoded, by producer and reason: near_duplicate.",
        "Nearly all of a producer's samples: its camera shows nothing new.", ("producer", "reason"),
    ),
    Spec(
        "learner", "histogram", "novelty_distance", "",
        "Distance of each sample to the nearest picture that was held, by producer; 2 where none "
        "came near. Only under `novelty: auto`.",
        "Below 0.12 all are near-duplicates; a median near 2: the camera shows new things.",
        ("producer",), buckets=(0.03, 0.06, 0.12, 0.2, 0.4, 0.7, 1.0),
    ),
    Spec(
        "learner", "counter", "dropped_class_samples_total", "samples",
        "Labelled samples dropped as near-duplicates, by class, and by whether the picture that "
        "each is one of has the same class, another one, or none that is known.",
        "With twin other these are dropped by mistake, unless labels are wrong.",
        ("class", "twin"),
    ),
    Spec(
        "learner", "gauge", "producer_slots", "slots", "Slots of the working memory, by producer.",
        "Below the guarantee: its samples are few, or near-duplicates.", ("producer",),
    ),
    Spec(
        "learner", "gauge", "producer_guaranteed_slots", "slots",
        "Slots that a producer keeps once it holds them.", "See `memory.shares`.", ("producer",),
    ),
    Spec(
        "learner", "counter", "replayed_samples_total", "samples",
        "Samples trained on again, drawn from the memory.",
        "The rate that the pace asks for; 0 when the stream alone keeps the learner busy.",
    ),
    Spec(
        "learner", "counter", "skipped_updates_total", "updates",
        "Steps without an update: loss or gradient not finite, keys not of unit norm, none due "
        "(pace), too little new (novelty).",
        "Any but pace and novelty, more than a few an hour: the learning rate is too high.",
        ("reason",),
    ),
    Spec(
        "learner", "gauge", "step", "steps",
        "Step of the learner, kept over restarts. Checkpoints count the same steps.",
        "Above checkpoint_step: a restart would go back to that step.", field="StepRecord.step",
    ),
    Spec(
        "learner", "gauge", "skipped_updates_in_a_row", "updates",
        "Updates skipped since the last one that was made, because loss, gradient or keys were not "
        "finite.", "At 20 the learner reloads an earlier checkpoint.",
    ),
    Spec(
        "learner", "counter", "divergence_reloads_total", "reloads",
        "Checkpoints reloaded because training had diverged.",
        "Any growth: the learning rate is too high. At 3 within 1,000 updates the learner halts.",
    ),
    Spec(
        "learner", "gauge", "learner_halted", "",
        "1 while the learner takes no samples because training has diverged, else 0.",
        "1: lower optimiser.learning_rate, and restart the learner.",
    ),
    Spec(
        "learner", "counter", "producer_decoded_samples_total", "samples",
        "Samples that were decoded, by producer. Some of them still wait for their batch.",
        "With quarantined_samples_total: the share of a producer's samples that is damaged.",
        ("producer",),
    ),
    Spec(
        "learner", "counter", "quarantined_samples_total", "samples",
        "Samples that could not be decoded, by reason and producer. The quarantine folder keeps "
        "the newest of them.",
        "A rise: the source of that producer sends damaged samples.", ("reason", "producer"),
    ),
    Spec(
        "learner", "histogram", "step_seconds", "seconds", "Time of one step, by phase.",
        "data above forward and backward: decoding is the limit, add workers.",
        ("phase",), STEP_BUCKETS,
    ),
    Spec(
        "learner", "gauge", "loss", "nats",
        "Loss of the last update; absent after one that was skipped as not finite.",
        "A level of log(N + 1) means that nothing is learnt.",
    ),
    Spec(
        "learner", "gauge", "loss_diagnostic", "", "What the loss reports of itself, by name.",
        "A clamp rate near 1: the debiased estimate sits on its floor, no gradient.", ("name",),
    ),
    Spec(
        "learner", "gauge", "gradient_norm", "", "Norm of the gradient of the last step.",
        "Jumps come before losses that are not finite.",
    ),
    Spec(
        "learner", "gauge", "relative_weight_change", "",
        "Norm of the change of the weights by the last update, over the norm of the weights.",
        "About 0.003 in a healthy run. Above 0.008 for a minute: the learning rate is too high.",
        field="StepRecord.relative_change",
    ),
    Spec(
        "learner", "gauge", "learning_rate", "", "Learning rate of the last step.",
        "Follows the schedule.",
    ),
    Spec(
        "learner", "gauge", "lag_seconds", "seconds",
        "For how long the oldest batch has waited since its last sample came; 0 when none waits. "
        "What is short of a batch is no lag.",
        "Steady growth: the learner does not keep up with the stream.",
    ),
    Spec(
        "learner", "gauge", "lag_records", "records",
        "Journal records received and not yet trained on; 0 where they are short of a batch.",
        "As lag_seconds.",
    ),
    Spec(
        "learner", "gauge", "pending_samples", "samples",
        "Samples read from the journal and not yet trained on: of batches made ahead, and those "
        "that wait until a batch is full.",
        "Steady, at less than two batches: the stream pauses.",
    ),
    Spec(
        "learner", "counter", "journal_corrupt_records_total", "records",
        "Journal records whose checksum was wrong when they were read, left out.",
        "Must stay 0; each is a packet that the weights never see.",
    ),
    Spec(
        "learner", "gauge", "gpu_memory_bytes", "bytes",
        "Memory of the learner's GPU: allocated to tensors, reserved by torch, and free of all "
        "processes.",
        "Free towards 0: the next larger allocation fails. Absent on a CPU.", ("kind",),
    ),
    # -- learner: collisions and balance
    Spec(
        "learner", "gauge", "collision_probability", "",
        "Probability that a sample and a slot of the working memory share a class: true among "
        "those that have labels; calibrated, by the cosines of all and what labelled pairs teach.",
        "Far above 1 / classes: a class crowds the memory. Absent where the stream has no labels.",
        ("kind",),
    ),
    Spec(
        "learner", "gauge", "collision_similarity", "",
        "Mean score h of a sample and a slot of the working memory, on the memory's descriptors; a "
        "similarity and no probability.",
        "A change of level: the stream or the memory changed. It says nothing of classes.",
        field="StepRecord.collision_expected",
    ),
    Spec(
        "learner", "gauge", "stream_effective_rank", "directions",
        "Effective rank of the stream's embeddings: exponential of the entropy of their spectrum.",
        "Towards 1: collapse. Less than the memory's where the stream repeats itself.",
    ),
    Spec(
        "learner", "gauge", "recent_effective_rank", "directions",
        "Effective rank of the keys of the last thousand samples or so, replays included.",
        "Far below effective_rank_peak while recent_image_rank stays: collapse.",
    ),
    Spec(
        "learner", "gauge", "effective_rank_peak", "directions",
        "The recent maximum of recent_effective_rank, kept over restarts.", "Steady.",
    ),
    Spec(
        "learner", "gauge", "recent_image_rank", "directions",
        "The same of the samples' thumbnails, which no training changes.",
        "A fall: the stream shows less, as when a camera is covered.",
    ),
    Spec(
        "learner", "gauge", "image_rank_peak", "directions",
        "The recent maximum of recent_image_rank, kept over restarts.", "Steady.",
    ),
    Spec(
        "learner", "counter", "stream_class_samples_total", "samples",
        "Labelled samples seen, by class.", "How unbalanced the stream is.", ("class",),
    ),
    Spec(
        "learner", "gauge", "stream_class_entropy_nats", "nats",
        "Entropy of the class labels of the recent stream.",
        "Less than the memory's memory_class_entropy_nats.",
    ),
    Spec(
        "learner", "gauge", "embedding_shift", "",
        "1 - cosine between the short and the long running mean of the keys.",
        "Early in a run it is the encoder that moves, later the stream.",
    ),
    Spec(
        "learner", "gauge", "image_shift", "",
        "1 - cosine between the short and the long running mean of the stream's thumbnails.",
        "A jump: the stream changed; no training moves it.",
    ),
    Spec(
        "learner", "counter", "drift_detections_total", "detections",
        "Changes of level found in a signal by ADWIN.",
        "image: the stream changed. The other signals move as the encoder learns, too.",
        ("signal",),
    ),
    # -- learner: probes that use labels of the stream or of a held-out set
    Spec(
        "learner", "counter", "prequential_samples_total", "samples",
        "Labelled samples that the online probe predicted before it learned from them.",
        "0: the stream carries no labels, and the figures below mean nothing.",
    ),
    Spec(
        "learner", "gauge", "prequential_accuracy", "",
        "Share of the last labelled samples that were predicted right, test then learn, by "
        "classifier on the keys.",
        "linear and knn above no_change and majority, which need no encoder.", ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_balanced_accuracy", "",
        "Mean over the classes of prequential_accuracy: what a balanced stream would give.",
        "Far below prequential_accuracy: the rare classes are not told apart.", ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_kappa", "",
        "Cohen's kappa of the same predictions: 0 is chance, 1 is perfect.",
        "Rises while the encoder learns; a fall after a change of the stream: forgetting.",
        ("classifier",),
    ),
    Spec(
        "learner", "gauge", "held_out_accuracy", "",
        "kNN accuracy of the encoder's features on the held-out labelled set, at the last probe.",
        "Rises; the one figure here that does not depend on the stream. Absent without such a set.",
    ),
    Spec(
        "learner", "gauge", "held_out_class_accuracy", "",
        "The same, by class.", "Classes that the stream left long ago fall: forgetting.",
        ("class",),
    ),
    Spec(
        "learner", "gauge", "held_out_step", "steps",
        "Step of the last probe of the held-out set.", "Follows the steps, by its interval.",
    ),
    Spec(
        "learner", "gauge", "held_out_probe_seconds", "seconds",
        "Time of the last probe of the held-out set, in which nothing is learned.",
        "Above a few per cent of its interval: probe less often, or fewer samples.",
    ),
    # -- learner: the working memory and its shadows, by the label "memory"
    Spec(
        "learner", "gauge", "memory_slots", "slots", "Slots that are filled.",
        "Reaches the capacity after as many samples, and stays.", ("memory",),
        field="MemoryStats.occupancy",
    ),
    Spec(
        "learner", "gauge", "memory_capacity_slots", "slots", "Slots that the memory has.",
        "Constant.", ("memory",), field="MemoryStats.capacity",
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
        "Samples found near-duplicates of a held one at admission, whether admitted or not.",
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
        field="MemoryStats.turnover",
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates", "samples",
        "Expected number of duplicates of a slot in its memory, N(j), by percentile; by the same "
        "score as memory_similarity.",
        "100 far above 50: one class or scene still crowds the memory.", ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates_mean", "samples",
        "Mean expected number of duplicates of a slot in its memory.",
        "Falls below that of a queue beside it.", ("memory",), field="MemoryStats.count_mean",
    ),
    Spec(
        "learner", "gauge", "memory_counted_slots", "slots",
        "Slots that memory_slot_duplicates and memory_similarity are taken over.",
        "Less than memory_slots: the memory is too large to count, they are an even sample.",
        ("memory",), field="MemoryStats.counted",
    ),
    Spec(
        "learner", "gauge", "memory_multiplicity_mean", "samples",
        "Mean number of samples that a slot stands for: itself and those merged into it.",
        "1 unless near-duplicates are merged; growth: the stream repeats itself.", ("memory",),
        field="MemoryStats.multiplicity_mean",
    ),
    Spec(
        "learner", "gauge", "memory_similarity", "",
        "Mean score h over the pairs of slots, on the working memory's descriptor, by the score of "
        "the memory's policy; by the working memory's where a shadow's policy has none.",
        "Falls below that of a queue beside it.", ("memory",),
        field="MemoryStats.expected_collisions",
    ),
    Spec(
        "learner", "gauge", "memory_effective_rank", "directions",
        "Effective rank of a memory's embeddings: exponential of the entropy of their spectrum.",
        "Falls as near-duplicates fill the memory; it does not follow the balance of classes, see "
        "docs/numbers.md.", ("memory",), field="MemoryStats.effective_rank",
    ),
    Spec(
        "learner", "gauge", "memory_near_duplicates_ratio", "ratio",
        "Share of the working memory's slots that are near-duplicates of another slot.",
        "Above a few per cent: the stream repeats itself faster than the memory sorts it out. "
        "Absent where the memory keeps no images, or counts on embeddings.",
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
    Spec(
        "learner", "gauge", "parked_journals", "journals",
        "Journals of this run that no rank reads, for their hosts are not there.",
        "Above 0: what they hold is learned when their hosts are back.",
    ),
    # -- learner: several ranks; absent with one process
    Spec(
        "learner", "counter", "rank_busy_seconds_total", "seconds",
        "Seconds that each rank of the group spent on its own, as all ranks know it.",
        "One that rises faster than the others: the slowest rank, for which they wait.", ("rank",),
    ),
    Spec(
        "learner", "counter", "rank_waited_seconds_total", "seconds",
        "Seconds that this rank spent in exchanges with the others.",
        "A large part of the time: its work is less than that of the slowest.",
    ),
    Spec(
        "learner", "counter", "rank_sent_bytes_total", "bytes",
        "Bytes that this rank gave to the others.", "Against what the network carries.",
    ),
    Spec(
        "learner", "counter", "rank_collectives_total", "exchanges",
        "Exchanges of this rank with the others.", "Some dozens for each step.",
    ),
    Spec(
        "learner", "gauge", "rank_shard_slots", "slots",
        "Slots of the memory that each rank's shard holds.", "Alike, to one slot.", ("rank",),
    ),
    # -- learner: checkpoints
    Spec(
        "learner", "gauge", "checkpoint_timestamp_seconds", "seconds",
        "Unix time of the newest durable checkpoint.", "Rises.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_age_seconds", "seconds",
        "Seconds since the newest durable checkpoint, or since the start when there is none.",
        "Grows while nothing is learned; what a kill would repeat is checkpoint_lag_seconds.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_lag_seconds", "seconds",
        "Age of the oldest step that no durable checkpoint holds; 0 when the newest has them all.",
        "Above three intervals: checkpoints fail, and the journal is not trimmed.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_step", "steps",
        "Step of the newest durable checkpoint.", "What a restart would go on from.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_bytes", "bytes",
        "Size of the newest checkpoint that this process wrote.",
        "Times the checkpoints kept: the disk that a run needs beside its journal.",
        field="CheckpointRecord.bytes",
    ),
    Spec(
        "learner", "histogram", "checkpoint_seconds", "seconds",
        "Time to make a checkpoint durable.", "Against the interval.", buckets=CHECKPOINT_BUCKETS,
        field="CheckpointRecord.seconds",
    ),
    Spec(
        "learner", "histogram", "checkpoint_stall_seconds", "seconds",
        "Time for which training waited for a checkpoint: for the copy of its state, where it is "
        "written behind.", "A tenth of checkpoint_seconds or less.", buckets=CHECKPOINT_BUCKETS,
        field="CheckpointRecord.stalled",
    ),
    Spec(
        "learner", "gauge", "checkpoints_damaged", "checkpoints",
        "Checkpoints that were found damaged and set aside as damaged-*, until they are removed.",
        "Above 0: the disk is failing, or somebody wrote there.",
    ),
    Spec(
        "learner", "counter", "checkpoint_failures_total", "checkpoints",
        "Checkpoints that could not be written.", "Any growth: disk full or read-only.",
    ),
)  # fmt: skip
