"""From the wire to the learner: receiver, journal and batches."""
