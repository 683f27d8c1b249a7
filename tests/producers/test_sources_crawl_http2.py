"""A crawl over TLS: HTTP/2 if the host offers it, and checks of certificates."""

import asyncio
import ssl
import threading
from typing import ClassVar

import h2.config
import h2.connection
import h2.events
import pytest
import trustme
from crawling import crawl_of
from source_files import encoded, pixels

from stream_ssl.producers.sources.base import SourceError

PNG = encoded(pixels(1, 64, 64, 3)[0])
BODIES = {
    b"/gone": b"<html>" + bytes(200_000),
    b"/page": b"<html>" + bytes(600_000),
    b"/large": PNG + bytes(20_000_000),
}


class Host(asyncio.Protocol):
    """Answers each stream of HTTP/2 with the image, and /robots.txt with 404."""

    streams = 0
    transports: ClassVar[list[asyncio.Transport]] = []

    def connection_made(self, transport):
        Host.transports.append(transport)
        self.transport = transport
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.unsent = {}
        self.http.initiate_connection()
        transport.write(self.http.data_to_send())

    def data_received(self, data):
        for event in self.http.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                Host.streams += 1
                path = dict(event.headers)[b":path"]
                status = "404" if path.startswith((b"/robots.txt", b"/gone")) else "200"
                self.http.send_headers(event.stream_id, [(":status", status)])
                name = path.rstrip(b"0123456789")
                self.unsent[event.stream_id] = memoryview(BODIES.get(name, PNG))
            if isinstance(event, h2.events.StreamReset):
                self.unsent.pop(event.stream_id, None)
        self.send()

    def send(self):
        """Send a part of each body, as the client's windows allow, and go on after other events."""
        more = False
        for stream, rest in list(self.unsent.items()):
            if size := min(len(rest), self.http.local_flow_control_window(stream), 16384):
                more = True
                self.http.send_data(stream, bytes(rest[:size]), end_stream=size == len(rest))
                self.unsent[stream] = rest[size:]
                if size == len(rest):
                    del self.unsent[stream]
        self.transport.write(self.http.data_to_send())
        if more and not self.transport.is_closing():
            asyncio.get_running_loop().call_soon(self.send)


@pytest.fixture
def host(tmp_path):
    """The port of a host that speaks only HTTP/2 over TLS, and a file of its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("good.test").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Host, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    Host.streams = 0
    Host.transports.clear()
    yield server.sockets[0].getsockname()[1], tmp_path / "authority.pem"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(ended())
    loop.close()


async def ended():
    """End all connections, also those whose handshake has not ended."""
    for transport in Host.transports:
        transport.abort()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for _ in range(50):  # until the transports are closed
        await asyncio.sleep(0.001)


def crawl(tmp_path, port, name, **settings):
    path = tmp_path / "urls.txt"
    path.write_text("".join(f"https://{name}:{port}/{n}\n" for n in range(20)))
    return crawl_of(path, **settings)


def test_requests_to_one_host_share_a_connection(tmp_path, host):
    port, authority = host
    source = crawl(tmp_path, port, "good.test", authorities=authority, per_host=8)
    assert [sample.data for sample, _ in source.samples()] == [PNG] * 20
    assert Host.streams == 21
    assert 1 <= len(Host.transports) <= 2


@pytest.mark.parametrize(("name", "rows"), [("gone", 90), ("page", 30), ("large", 8)])
def test_unread_answers_do_not_block_later_answers(tmp_path, host, name, rows):
    port, authority = host
    path = tmp_path / "urls.txt"
    names = [f"{name}{row}" for row in range(rows)] + [f"good{row}" for row in range(20)]
    path.write_text("".join(f"https://good.test:{port}/{name}\n" for name in names))
    patience = {"per_host": 4, "retries": 1, "seconds": 10}
    source = crawl_of(path, authorities=authority, max_bytes=1_000_000, **patience)
    assert [sample.data for sample, _ in source.samples()] == [PNG] * 20
    assert sum(source.skipped.by_reason.values()) == rows


@pytest.mark.parametrize(("name", "trusted"), [("other.test", True), ("good.test", False)])
def test_a_crawl_refuses_a_certificate_of_another_host_or_an_unknown_authority(
    tmp_path, host, name, trusted
):
    port, authority = host
    source = crawl(tmp_path, port, name, authorities=authority if trusted else None)
    with pytest.raises(SourceError, match="not one sample of a whole pass can be read"):
        next(source.samples())
    assert source.skipped.by_reason == {"no robots.txt": 20}
    assert Host.streams == 0
