"""The downloads of a crawl: they limit what web servers that nobody knows can cost."""
