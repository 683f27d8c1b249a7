"""The options of the daemon, and the objects that are built from them."""
