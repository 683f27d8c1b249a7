"""The processes of a run: the receiver, the learner and its ranks, and their supervisor."""
