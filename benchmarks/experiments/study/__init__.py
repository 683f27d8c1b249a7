"""The study of how a memory's policy affects the encoder that learns with it (docs/study.md)."""
