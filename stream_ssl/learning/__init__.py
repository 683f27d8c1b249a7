"""Training of an encoder on a stream: views, pace, the learner and its checkpoints."""
