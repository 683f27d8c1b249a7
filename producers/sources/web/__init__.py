"""Fetches images from web servers that nobody vouches for."""
