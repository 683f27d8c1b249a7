"""The demo: the whole system at work on embedded images, shown live and written up in a report."""
