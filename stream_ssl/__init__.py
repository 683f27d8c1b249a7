"""stream-ssl: learn an image encoder from an endless, uncurated stream."""

__version__ = "0.1.0"
