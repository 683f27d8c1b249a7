"""One file a command; each has main(arguments) -> exit status."""
