"""The former name of `stream_ssl.feed`. Decoders of users still import it."""
