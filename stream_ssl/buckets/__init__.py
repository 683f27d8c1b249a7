"""Sealed folders in buckets, and copies of checkpoints there."""
