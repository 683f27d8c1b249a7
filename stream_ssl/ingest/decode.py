"""The former name of `stream_ssl.feed.decode`, for decoders that users wrote."""

from stream_ssl.feed.decode import *  # noqa: F403
