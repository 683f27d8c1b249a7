"""Chaos: what brings a daemon down elsewhere, done to this one, with figures (`make chaos`)."""
