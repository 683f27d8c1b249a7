"""The journal: an ordered, durable log of packets on disk, between the receiver and the learner.

This package imports neither torch nor zmq.
"""
