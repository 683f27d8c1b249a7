"""Speed and memory, measured; each module has run() -> rows, and runs by itself too."""
