"""The demo: it runs the whole system on embedded images, shows it live and writes a report."""
