"""For all tests: the numeric libraries share the cores with the processes that tests start."""

from stream_ssl.app.threads import share_cores

share_cores()
