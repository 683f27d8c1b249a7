"""Benchmarks of speed and memory. Most modules have `run() -> rows`, which __main__ calls."""

from stream_ssl.process.threads import share_cores

share_cores()  # the learner does the same; must precede any import of torch
