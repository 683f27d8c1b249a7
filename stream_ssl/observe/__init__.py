"""What a run shows of itself: metrics, health, balance, drift, and a probe of the features."""
