"""From the wire to the learner: receiver, journal and batches.

receiver -> protocol_state -> group_commit -> journal: a sample is durable, and may be acknowledged,
when `Journal.append` returns. batches reads the journal for the learner, which reports through
consumer_offsets what may be trimmed.
"""
