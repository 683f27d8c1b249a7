"""The learner's input: decoded batches of one size, and a quarantine for bad samples."""
