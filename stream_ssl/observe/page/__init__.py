"""The status page: what it asks for, as JSON, and the files that a browser shows it with."""
