"""The journal: ordered, durable packets on disk, between the receiver and the learner.

Imports neither torch nor zmq.
"""
