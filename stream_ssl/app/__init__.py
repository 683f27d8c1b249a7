"""The commands, and the code that builds a run from its parts."""
