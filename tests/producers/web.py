"""A small web on loopback, whose hosts answer as a test wants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

Answer = Callable[["Request"], Awaitable[None]]


class Request:
    """A request that can be answered."""

    def __init__(self, host: str, path: str, headers: dict[str, str], writer: Any) -> None:
        self.host, self.path, self.headers, self.writer = host, path, headers, writer

    async def send(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        """Send a whole response. An underscore in a header's name stands for a hyphen."""
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


class Web:
    """A server with answers by path, by "HOST/PATH", and `answers["*"]` for all other requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []  # HOST/PATH
        self.agents: set[str] = set()
        self.open: dict[asyncio.Task[None], asyncio.WriteTransport] = {}  # keeps the tasks, too
        self.port = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self.serve(reader, writer))
        self.open[task] = writer.transport
        task.add_done_callback(self.open.pop)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError),
            closing(writer.transport),
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split()[1]
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
                host = headers["host"].partition(":")[0]
                self.asked.append(host + path)
                self.agents.add(headers["user-agent"])
                found = [host + path, path, f"{host}/*", "*"]
                answer = next(self.answers[key] for key in found if key in self.answers)
                await answer(Request(host, path, headers, writer))


@contextmanager
def web() -> Iterator[Web]:
    """Run the web in a thread. robots.txt is missing unless the test gives an answer."""
    served, loop = Web(), asyncio.new_event_loop()

    async def missing(request: Request) -> None:
        await request.send(status=404)

    served.answers["*"] = missing
    started = loop.create_future()

    async def run() -> None:
        server = await asyncio.start_server(served.accept, "127.0.0.1", 0)
        served.port = server.sockets[0].getsockname()[1]
        started.set_result(None)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()  # serve_forever would wait for connections at its end
        server.close()
        await asyncio.sleep(0.01)  # for connections that were accepted just now to get their tasks
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for transport in served.open.values():  # a client that reads no more would keep it open
            transport.abort()
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0.01)  # for transports to close

    task = loop.create_task(run())
    loop.run_until_complete(started)
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
