"""Commands, and what puts the parts together. Nothing imports this but tests."""
