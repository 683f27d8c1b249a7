"""Chaos tests: faults that end other daemons are made here and measured (`make chaos`)."""
