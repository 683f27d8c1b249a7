"""The work of stream-ssl evaluate: from checkpoints and labelled sets to a report."""
