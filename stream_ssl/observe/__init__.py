"""The observation of a run: metrics, health, conditions, probes, drift and the page."""
