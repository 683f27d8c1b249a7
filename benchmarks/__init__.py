"""Speed and memory, measured; each module has run() -> rows, and runs by itself too."""

from stream_ssl.app.threads import share_cores

share_cores()  # as the learner does, before any module here imports torch
