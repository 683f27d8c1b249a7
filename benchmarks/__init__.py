"""Benchmarks of speed and memory. Each module has `run() -> rows` and can also run alone."""

from stream_ssl.process.threads import share_cores

share_cores()  # the learner does the same; must precede any import of torch
