"""What a memory's policy is worth to the encoder that learns against it.

`python -m benchmarks.study --data FOLDER`: `--help` says more.
"""
