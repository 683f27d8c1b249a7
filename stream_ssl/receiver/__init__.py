"""The receiver process: it authenticates producers, commits what they send, and acknowledges it.

Imports neither torch nor faiss.
"""
