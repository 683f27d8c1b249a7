"""The receiver process, which authenticates producers, commits their packets and acknowledges them.

Three names mean the same in all its modules: `route` is the routing id of a connection, `user` its
public key or None in plain text, and `now` the time of time.monotonic.

This package imports neither torch nor faiss.
"""
