"""The catalogue's entries for metrics that only the learner exports."""

from __future__ import annotations

from stream_ssl.observe.metric_spec import Spec

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHECKPOINT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

LEARNER: tuple[Spec, ...] = (
    # -- learner: the loop
    Spec(
        "learner", "counter", "steps_total", "steps",
        "Updates of the weights since this process started.",
        "A rate of 0 while lag_seconds grows: the learner is stuck.",
    ),
    Spec(
        "learner", "counter", "trained_samples_total", "samples",
        "New samples of the stream that the learner trained on since this process started. "
        "replayed_samples_total counts those that it trained on again.",
        "The rates of this metric, near_duplicates_total and skipped_samples_total add up to the "
        "rate of received_samples_total if the learner keeps up.",
    ),
    Spec(
        "learner", "counter", "skipped_samples_total", "samples",
        "New samples in steps without an update, by reason. The reasons are those of "
        "skipped_updates_total.",
        "Growth for any reason but pace: the encoder learned nothing from these samples.",
        ("reason",),
    ),
    Spec(
        "learner", "counter", "near_duplicates_total", "samples",
        "Samples that were dropped as near-duplicates before they were encoded.",
        "The share of the stream that the near-duplicate test drops.",
        field="StepRecord.near_duplicates",
    ),
    Spec(
        "learner", "counter", "producer_admitted_samples_total", "samples",
        "New samples that passed the near-duplicate test, by producer. They train at once, or as "
        "soon as they fill a batch.",
        "Compare it with dropped_samples_total.", ("producer",),
    ),
    Spec(
        "learner", "counter", "dropped_samples_total", "samples",
        "Samples that were dropped before they were encoded, by producer and reason. The only "
        "reason is near_duplicate.",
        "Nearly all samples of a producer are dropped: its camera shows nothing new.",
        ("producer", "reason"),
    ),
    Spec(
        "learner", "histogram", "novelty_distance", "",
        "Distance of each sample to the nearest picture that is held, by producer. It is 2 if no "
        "picture is near. Only `novelty: auto` measures it.",
        "All samples below 0.12 are near-duplicates. A median near 2: the camera shows new things.",
        ("producer",), buckets=(0.03, 0.06, 0.12, 0.2, 0.4, 0.7, 1.0),
    ),
    Spec(
        "learner", "counter", "dropped_class_samples_total", "samples",
        "Labelled samples that were dropped as near-duplicates, by class and twin. The twin is "
        "the held picture that the sample resembles: its class is the same, other, or unknown.",
        "Growth with twin other: these samples were dropped by mistake, unless labels are wrong.",
        ("class", "twin"),
    ),
    Spec(
        "learner", "gauge", "producer_slots", "slots", "Slots of the working memory, by producer.",
        "Fewer slots than the guarantee: the producer sends few samples, or near-duplicates.",
        ("producer",),
    ),
    Spec(
        "learner", "gauge", "producer_guaranteed_slots", "slots",
        "Slots that a producer keeps once it has filled them.",
        "The option `memory.shares` sets them.", ("producer",),
    ),
    Spec(
        "learner", "counter", "replayed_samples_total", "samples",
        "Samples that were drawn from the memory and trained on again.",
        "The rate follows the pace. It is 0 if the stream alone keeps the learner busy.",
    ),
    Spec(
        "learner", "counter", "skipped_updates_total", "updates",
        "Steps without an update, by reason: loss or gradient (not finite), keys (not of unit "
        "norm), pace (no update is due), novelty (too few new samples).",
        "More than a few an hour for any reason but pace and novelty: the learning rate is too "
        "high.", ("reason",),
    ),
    Spec(
        "learner", "gauge", "step", "steps",
        "Number of the learner's latest step. A step makes no update while too few samples are "
        "new. The number continues over restarts, and checkpoints use the same number.",
        "The difference to checkpoint_step: the steps that a restart would repeat.",
        field="StepRecord.step",
    ),
    Spec(
        "learner", "gauge", "skipped_updates_in_a_row", "updates",
        "Updates skipped since the last successful update, because loss, gradient or keys were "
        "not finite.", "At 20, the learner reloads an earlier checkpoint.",
    ),
    Spec(
        "learner", "counter", "divergence_reloads_total", "reloads",
        "Checkpoints that were reloaded because training had diverged.",
        "Any growth: the learning rate is too high. After 3 reloads within 1,000 updates, the "
        "learner halts.",
    ),
    Spec(
        "learner", "gauge", "learner_halted", "",
        "1 while the learner takes no samples because training has diverged, otherwise 0.",
        "1: lower optimiser.learning_rate, and restart the learner.",
    ),
    Spec(
        "learner", "counter", "producer_decoded_samples_total", "samples",
        "Samples that were decoded, by producer. Some of them still wait for their batch.",
        "Compare it with quarantined_samples_total: the share of damaged samples of a producer.",
        ("producer",),
    ),
    Spec(
        "learner", "counter", "quarantined_samples_total", "samples",
        "Samples that could not be decoded, by reason and producer. The quarantine folder keeps "
        "the newest ones.", "Growth: the source of this producer sends damaged samples.",
        ("reason", "producer"),
    ),
    Spec(
        "learner", "counter", "logger_failures_total", "failures",
        "Failures of a logger beside the run, by logger (`loggers`). The run goes on without it.",
        "Growth: the log names the reason once.", ("logger",),
    ),
    Spec(
        "learner", "gauge", "originals_bytes", "bytes",
        "Bytes of the files that hold the memory's samples as they were sent (originals.budget).",
        "Near originals.budget: the originals of new samples find no room.",
    ),
    Spec(
        "learner", "counter", "unkept_samples_total", "samples",
        "Samples whose bytes were not kept, by folder and reason: originals (originals.budget, or "
        "the disk) and the quarantine (its rate of 50 a second, or the disk).",
        "Growth by disk: the folder cannot be written. By budget: raise originals.budget.",
        ("folder", "reason"),
    ),
    Spec(
        "learner", "histogram", "step_seconds", "seconds", "Time of one step, by phase.",
        "The phase data takes longer than forward and backward: decoding limits the speed, so add "
        "workers.", ("phase",), STEP_BUCKETS,
    ),
    Spec(
        "learner", "gauge", "loss", "nats",
        "Loss of the last update. It is absent after an update that was skipped because it was "
        "not finite.", "A level of log(N + 1): the encoder learns nothing.",
    ),
    Spec(
        "learner", "gauge", "loss_diagnostic", "", "Diagnostic values of the loss, by name.",
        "A clamp rate near 1: the debiased estimate is at its lower limit and gives no gradient.",
        ("name",),
    ),
    Spec(
        "learner", "gauge", "gradient_norm", "", "Norm of the gradient of the last step.",
        "Jumps often precede losses that are not finite.",
    ),
    Spec(
        "learner", "gauge", "relative_weight_change", "",
        "Norm of the last change of the weights, divided by the norm of the weights.",
        "About 0.003 in a healthy run. Above 0.008 for a minute: the learning rate is too high.",
        field="StepRecord.relative_change",
    ),
    Spec(
        "learner", "gauge", "learning_rate", "", "Learning rate of the last step.",
        "It follows the schedule.",
    ),
    Spec(
        "learner", "gauge", "lag_seconds", "seconds",
        "Seconds that the oldest waiting batch has waited since its last sample arrived. It is 0 "
        "if no batch waits. Samples of an incomplete batch do not count.",
        "Steady growth: the learner does not keep up with the stream.",
    ),
    Spec(
        "learner", "gauge", "lag_records", "records",
        "Journal records that were received and not yet trained on. It is 0 if they do not fill a "
        "batch.", "Steady growth: the learner does not keep up with the stream.",
    ),
    Spec(
        "learner", "gauge", "pending_samples", "samples",
        "Samples that were read from the journal and not yet trained on. They are in prepared "
        "batches, or in an incomplete batch.",
        "A constant value below two batches: the stream pauses.",
    ),
    Spec(
        "learner", "counter", "journal_corrupt_records_total", "records",
        "Journal records that were left out because their checksum was wrong.",
        "Above 0: the learner never sees these packets. Check the disk.",
    ),
    Spec(
        "learner", "gauge", "gpu_memory_bytes", "bytes",
        "Memory of the learner's GPU, by kind: allocated to tensors, reserved by torch, and free "
        "for all processes.",
        "Free memory near 0: the next larger allocation fails. The metric is absent on a CPU.",
        ("kind",),
    ),
    # -- learner: collisions and balance
    Spec(
        "learner", "gauge", "collision_probability", "",
        "Probability that a sample and a slot of the working memory share a class. The kind true "
        "is measured among labelled samples. The kind calibrated is estimated from cosines, by a "
        "fit to labelled pairs. Both are means of about 16 batches.",
        "Far above 1 / classes: a class crowds the memory. The metric is absent if the stream has "
        "no labels.", ("kind",),
    ),
    Spec(
        "learner", "gauge", "collision_similarity", "",
        "Mean score h of a sample and a slot of the working memory, on the memory's descriptors. "
        "It is a similarity and not a probability.",
        "A change of level: the stream or the memory changed. It says nothing about classes.",
        field="StepRecord.collision_expected",
    ),
    Spec(
        "learner", "gauge", "stream_effective_rank", "directions",
        "Effective rank of the stream's embeddings: exponential of the entropy of their spectrum.",
        "Near 1: collapse. It is lower than the memory's effective rank if the stream repeats "
        "itself.",
    ),
    Spec(
        "learner", "gauge", "recent_effective_rank", "directions",
        "Effective rank of the keys of about the last thousand samples, replays included.",
        "Far below effective_rank_peak while recent_image_rank is constant: collapse.",
    ),
    Spec(
        "learner", "gauge", "effective_rank_peak", "directions",
        "Recent maximum of recent_effective_rank. It continues over restarts.",
        "A constant value is normal.",
    ),
    Spec(
        "learner", "gauge", "recent_image_rank", "directions",
        "Effective rank of the thumbnails of about the last thousand samples. Training does not "
        "change thumbnails.",
        "A fall: the stream shows fewer different things, for example because a camera is covered.",
    ),
    Spec(
        "learner", "gauge", "image_rank_peak", "directions",
        "Recent maximum of recent_image_rank. It continues over restarts.",
        "A constant value is normal.",
    ),
    Spec(
        "learner", "counter", "stream_class_samples_total", "samples",
        "Labelled samples that were received, by class.", "The imbalance of the stream.",
        ("class",),
    ),
    Spec(
        "learner", "gauge", "stream_class_entropy_nats", "nats",
        "Entropy of the class labels of the recent stream.",
        "It is lower than memory_class_entropy_nats if the memory balances the stream.",
    ),
    Spec(
        "learner", "gauge", "embedding_shift", "",
        "1 - cosine between the short and the long running mean of the keys.",
        "Early in a run the encoder changes. Later a rise means that the stream changed.",
    ),
    Spec(
        "learner", "gauge", "image_shift", "",
        "1 - cosine between the short and the long running mean of the stream's thumbnails.",
        "A jump: the stream changed. Training does not change this metric.",
    ),
    Spec(
        "learner", "counter", "drift_detections_total", "detections",
        "Changes of level that ADWIN found, by signal.",
        "Signal image: the stream changed. The other signals also change while the encoder learns.",
        ("signal",),
    ),
    # -- learner: probes that use labels of the stream or of a held-out set
    Spec(
        "learner", "counter", "prequential_samples_total", "samples",
        "Labelled samples that the online probe predicted before it learned from them.",
        "0: the stream carries no labels, and the other prequential metrics mean nothing.",
    ),
    Spec(
        "learner", "gauge", "prequential_covered_samples", "samples",
        "Last labelled samples that the prequential accuracies cover.",
        "With n samples, an accuracy p has a standard error of sqrt(p (1 - p) / n) or more.",
    ),
    Spec(
        "learner", "gauge", "prequential_accuracy", "",
        "Share of the last labelled samples that the online probe predicted correctly, by "
        "classifier on the keys. Each sample is predicted before the probe learns from it.",
        "linear and knn above no_change and majority, which need no encoder: the encoder is "
        "useful.", ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_balanced_accuracy", "",
        "Mean of prequential_accuracy over the classes, which estimates the accuracy on a "
        "balanced stream.",
        "Far below prequential_accuracy: the encoder does not distinguish the rare classes.",
        ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_kappa", "",
        "Cohen's kappa of the predictions of the online probe. 0 is chance, and 1 is perfect.",
        "It rises while the encoder learns. A fall after a change of the stream: forgetting.",
        ("classifier",),
    ),
    Spec(
        "learner", "gauge", "held_out_accuracy", "",
        "kNN accuracy of the encoder's features on the held-out labelled set, at the last probe.",
        "It rises while the encoder learns. It does not depend on the stream. It is absent "
        "without a held-out set.",
    ),
    Spec(
        "learner", "gauge", "held_out_linear_accuracy", "",
        "Accuracy of a linear layer on the encoder's features on the held-out labelled set, at the "
        "last probe.",
        "It rises while the encoder learns. It is mostly above held_out_accuracy.",
    ),
    Spec(
        "learner", "gauge", "held_out_first_accuracy", "",
        "kNN accuracy on the held-out labelled set before the first update of the run.",
        "A held-out accuracy that stays near it shows that the run does not learn. It is absent "
        "in a run that began without this held-out set.",
    ),
    Spec(
        "learner", "gauge", "held_out_rise_error", "",
        "Standard error of the change of held_out_accuracy within the last hour, from the pairs of "
        "answers to each held-out image.",
        "A change below twice this value may be chance.",
    ),
    Spec(
        "learner", "gauge", "held_out_class_accuracy", "",
        "kNN accuracy on the held-out labelled set at the last probe, by class.",
        "A fall for classes that left the stream long ago: forgetting.", ("class",),
    ),
    Spec(
        "learner", "gauge", "held_out_step", "steps", "Step of the last probe of the held-out set.",
        "It follows the learner's step at the interval of the probe.",
    ),
    Spec(
        "learner", "gauge", "held_out_probe_seconds", "seconds",
        "Time of the last probe of the held-out set. Training waits for this time.",
        "Above a few per cent of the probe's interval: probe less often, or use fewer samples.",
    ),
    # -- learner: the working memory and its shadows, by the label "memory"
    Spec(
        "learner", "gauge", "memory_slots", "slots", "Slots that hold a sample.",
        "It grows up to the capacity and then stays there.", ("memory",),
        field="MemoryStats.occupancy",
    ),
    Spec(
        "learner", "gauge", "memory_capacity_slots", "slots", "Slots of the memory.",
        "It is constant.", ("memory",), field="MemoryStats.capacity",
    ),
    Spec(
        "learner", "counter", "memory_inserted_total", "samples",
        "Samples that were written to a slot.",
        "Compare the rate with the rate of trained_samples_total: the turnover.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_evictions_total", "samples",
        "Samples that were evicted from their slots.",
        "The rate equals the rate of memory_inserted_total once the memory is full.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_refused_total", "samples",
        "Samples that were not admitted because they would have been the most duplicated.",
        "It grows only under eviction policies that may refuse a newcomer.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_near_duplicates_total", "samples",
        "Samples that were near-duplicates of a held sample at admission, whether they were "
        "admitted or not.",
        "Compare the rate with the rate of trained_samples_total. It is 0 if the memory's "
        "`duplicates` is not set.", ("memory",),
    ),
    Spec(
        "learner", "counter", "memory_merged_total", "samples",
        "Near-duplicates that were merged into the slot that they resemble. Each of them also "
        "counts as refused.",
        "It is at most memory_near_duplicates_total, and equal to it with action merge.",
        ("memory",),
    ),
    Spec(
        "learner", "gauge", "memory_age_samples", "samples",
        "Age of the slots, by percentile: the samples that were added since the slot was written.",
        "Percentile 100 grows without end: some slots are never evicted. They may hold noise.",
        ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_staleness_samples", "samples",
        "Samples that were added since the embedding of a slot was computed, by percentile.",
        "Equal to memory_age_samples: no slot is encoded again. Percentile 100 far above 90: some "
        "slots are never encoded again.", ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_reencoding_shift", "",
        "1 - cosine between the old and the new embedding of the slots that were encoded again "
        "last, mean and maximum. It is 0 before the first time.",
        "A large value: the encoder changes faster than the memory is refreshed, so encode more "
        "slots in each step.", ("memory", "statistic"),
    ),
    Spec(
        "learner", "gauge", "memory_turnover_ratio", "ratio",
        "Share of the slots whose sample is among the last offered samples. As many offered "
        "samples count as the memory has slots. It is 1 for a queue.",
        "Near 0: the memory hardly changes, because newcomers are refused or evict each other.",
        ("memory",), field="MemoryStats.turnover",
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates", "samples",
        "Expected number of duplicates of a slot in its memory, N(j), by percentile. The score is "
        "that of memory_similarity.",
        "Percentile 100 far above 50: one class or scene still crowds the memory.",
        ("memory", "percentile"),
    ),
    Spec(
        "learner", "gauge", "memory_slot_duplicates_mean", "samples",
        "Mean expected number of duplicates of a slot in its memory.",
        "It is lower than the value of a queue shadow.", ("memory",),
        field="MemoryStats.count_mean",
    ),
    Spec(
        "learner", "gauge", "memory_counted_slots", "slots",
        "Slots on which memory_slot_duplicates and memory_similarity are measured.",
        "Below memory_slots: the memory is too large to count all slots, so an even sample of the "
        "slots is counted.", ("memory",), field="MemoryStats.counted",
    ),
    Spec(
        "learner", "gauge", "memory_multiplicity_mean", "samples",
        "Mean number of samples that a slot represents: its own sample and the merged ones.",
        "It is 1 unless near-duplicates are merged. Growth: the stream repeats itself.",
        ("memory",), field="MemoryStats.multiplicity_mean",
    ),
    Spec(
        "learner", "gauge", "memory_similarity", "",
        "Mean score h over the pairs of slots, on the working memory's descriptor. The score is "
        "that of the memory's policy. A shadow whose policy has no score uses the score of the "
        "working memory.", "It is lower than the value of a queue shadow.", ("memory",),
        field="MemoryStats.expected_collisions",
    ),
    Spec(
        "learner", "gauge", "memory_effective_rank", "directions",
        "Effective rank of a memory's embeddings: exponential of the entropy of their spectrum.",
        "A fall: near-duplicates fill the memory. It does not follow the balance of classes, see "
        "docs/numbers.md.", ("memory",), field="MemoryStats.effective_rank",
    ),
    Spec(
        "learner", "gauge", "memory_near_duplicates_ratio", "ratio",
        "Share of the working memory's slots that are near-duplicates of another slot. It is "
        "measured on 256 other slots in each survey, over 8 surveys. Its standard error is then at "
        "most 1.1 points, and 0 in a memory of at most 2,048 slots.",
        "Above a few per cent: the stream repeats itself faster than the memory can remove "
        "near-duplicates. The metric is absent if the memory keeps no images.",
    ),
    Spec(
        "learner", "gauge", "memory_class_slots", "slots", "Labelled slots, by class.",
        "Compare the share of the most frequent class with its share of the stream.",
        ("memory", "class"),
    ),
    Spec(
        "learner", "gauge", "memory_class_entropy_nats", "nats",
        "Entropy of the class labels of a memory. It is log(classes) if the memory is balanced.",
        "It is higher than the value of a queue shadow.", ("memory",),
    ),
    Spec(
        "learner", "gauge", "parked_journals", "journals",
        "Journals of this run that no rank reads, because their hosts are absent.",
        "Above 0: the learner reads these journals when their hosts are back.",
    ),
    # -- learner: several ranks; absent with one process
    Spec(
        "learner", "counter", "rank_busy_seconds_total", "seconds",
        "Seconds that each rank of the group spent on its own work. All ranks export all values.",
        "The rank whose value rises fastest is the slowest rank. The others wait for it.",
        ("rank",),
    ),
    Spec(
        "learner", "counter", "rank_waited_seconds_total", "seconds",
        "Seconds that this rank spent in exchanges with the other ranks.",
        "A large share of the time: this rank has less work than the slowest rank.",
    ),
    Spec(
        "learner", "counter", "rank_sent_bytes_total", "bytes",
        "Bytes that this rank sent to the other ranks.",
        "Compare the rate with the speed of the network.",
    ),
    Spec(
        "learner", "counter", "rank_collectives_total", "exchanges",
        "Exchanges of this rank with the other ranks.", "Some dozens for each step are normal.",
    ),
    Spec(
        "learner", "gauge", "rank_shard_slots", "slots",
        "Slots of each rank's shard of the memory.",
        "The values of the ranks differ by at most one slot.", ("rank",),
    ),
    # -- learner: checkpoints
    Spec(
        "learner", "gauge", "checkpoint_timestamp_seconds", "seconds",
        "Unix time of the newest durable checkpoint.", "It rises with each checkpoint.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_age_seconds", "seconds",
        "Seconds since the newest durable checkpoint, or since the start if there is no "
        "checkpoint.",
        "It also grows while nothing is learned. checkpoint_lag_seconds shows the work that a "
        "crash would repeat.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_lag_seconds", "seconds",
        "Age of the oldest step that no durable checkpoint contains. It is 0 if the newest "
        "checkpoint contains all steps.",
        "Above three intervals: checkpoints fail, and the journal is not trimmed.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_step", "steps", "Step of the newest durable checkpoint.",
        "A restart continues from this step.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_bytes", "bytes",
        "Size of the newest checkpoint that this process wrote.",
        "This size times the number of kept checkpoints is the disk space that a run needs beside "
        "its journal.", field="CheckpointRecord.bytes",
    ),
    Spec(
        "learner", "histogram", "checkpoint_seconds", "seconds",
        "Time to make a checkpoint durable.", "Compare it with the interval between checkpoints.",
        buckets=CHECKPOINT_BUCKETS, field="CheckpointRecord.seconds",
    ),
    Spec(
        "learner", "histogram", "checkpoint_stall_seconds", "seconds",
        "Time that training waited for a checkpoint. If the checkpoint is written in the "
        "background, this is the time to copy the state.",
        "A tenth of checkpoint_seconds or less is normal.", buckets=CHECKPOINT_BUCKETS,
        field="CheckpointRecord.stalled",
    ),
    Spec(
        "learner", "gauge", "checkpoints_damaged", "checkpoints",
        "Checkpoints that are damaged and were renamed to damaged-*. They count until somebody "
        "removes them.", "Above 0: the disk is failing, or another program changed the files.",
    ),
    Spec(
        "learner", "counter", "checkpoint_failures_total", "checkpoints",
        "Checkpoints that could not be written.", "Any growth: the disk is full or read-only.",
    ),
    Spec(
        "learner", "counter", "checkpoint_copies_total", "checkpoints",
        "Checkpoints that were copied to the bucket (copies.to).",
        "No growth while checkpoint_step rises: see checkpoint_copy_late_seconds.",
    ),
    Spec(
        "learner", "counter", "checkpoint_copy_failures_total", "checkpoints",
        "Checkpoints that could not be copied to the bucket. Training continues.",
        "Growth: the log names the reason once.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_copy_step", "steps",
        "Step of the newest checkpoint in the bucket.", "It follows checkpoint_step.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_copy_late_seconds", "seconds",
        "Time since which a checkpoint waits to be copied to the bucket. It is 0 if none waits.",
        "More than 30 min: the bucket fails, or is too slow for the checkpoints.",
    ),
)  # fmt: skip
