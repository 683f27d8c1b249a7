"""The receiver process, which authenticates producers, commits their packets and acknowledges them.

This package imports neither torch nor faiss.
"""
