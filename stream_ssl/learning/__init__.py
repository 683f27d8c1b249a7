"""From batches to an encoder: views, pace, the learner, and its checkpoints."""
