"""What a memory's policy is worth to the encoder that learns against it.

`python -m benchmarks.memory_policies --data FOLDER`: `--help` says more.
"""
