"""The status page: its JSON API, and the files that a browser loads."""
