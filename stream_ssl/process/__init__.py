"""Exit statuses, signals, logs, threads and locks, for any process of this project."""
