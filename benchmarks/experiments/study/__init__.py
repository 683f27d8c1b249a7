"""What the policy of a memory is worth to the encoder that learns against it (docs/study.md)."""
