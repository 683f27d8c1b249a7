"""One file for each command. Each has a function main(arguments) that returns the exit status."""
