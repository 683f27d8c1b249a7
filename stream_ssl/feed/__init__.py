"""The learner's input: decoded batches of one size from the journal; bad samples are set aside."""
