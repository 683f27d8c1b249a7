"""stream-ssl evaluate: checkpoints and labelled sets to a report."""
