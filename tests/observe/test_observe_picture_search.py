"""The search of the memory for a picture of the user: answers, limits and access."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from page_world import Feed, receiving, serving
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.feed.decode import Decoder, content_hashes
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.observe.page.api import BYTES, MOST_PICTURE, Sources
from stream_ssl.observe.page.picture_search import PictureSearch
from stream_ssl.producers._images import as_sample
from stream_ssl.receiver.sessions import ProducerTable

SIDE = 16
HEADERS = {"content-type": BYTES}


def decode(data: bytes) -> Tensor:
    pixels_HWC = Decoder(SIDE, 3).decode(as_sample(data, id="picture"))
    return torch.from_numpy(np.array(pixels_HWC.transpose(2, 0, 1), order="C"))


def encode(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows that depend on the other images of the batch, as with BatchNorm."""
    flat_BP = image_BCHW.flatten(1).float()
    return normalize(flat_BP[:, :8] - flat_BP[:, :8].mean(0), dim=1), flat_BP[:, 8:14]


def png(pixels_HWC: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels_HWC)).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[str, Feed, Any]]:
    feed = Feed(32, descriptor=Thumbnail(side=4))
    for _ in range(6):
        feed.step()
    with serving(feed) as (server, view):
        assert view is not None
        view.search = PictureSearch(feed.memory, decode, encode)
        yield server.address, feed, view


def asked(address: str, data: bytes, query: str = "", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=30) as client:
        return client.post(
            f"{address}/api/learner/memory/search{query}",
            content=data,
            headers={**HEADERS, **headers},
        )


def test_the_search_finds_the_same_slots_as_a_naive_loop(world: tuple[str, Feed, Any]) -> None:
    """This holds for both spaces, for a picture in the memory and for another picture."""
    address, feed, _ = world
    memory = feed.memory
    assert memory.images is not None
    for image_CHW in (memory.images[5], 255 - memory.images[7]):
        told = asked(address, png(image_CHW.permute(1, 2, 0)), "?count=5").json()
        held = torch.linspace(0, len(memory) - 1, 31).long()
        z_1D = encode(torch.cat([image_CHW[None], memory.images[held]]))[0][:1]
        rows = {
            "embedding": (z_1D, memory.embeddings),
            "descriptor": (memory.descriptor(z_1D, image_CHW[None]), memory.descriptors),
        }
        for space, (query_1X, row_kX) in rows.items():
            cosines = [float((query_1X[0] * row.float()).sum()) for row in row_kX]
            best = sorted(range(len(cosines)), key=lambda slot: -cosines[slot])[:5]
            near = told["near"][space]
            assert [round(cosines[one["slot"]], 3) for one in near] == [
                round(cosines[slot], 3) for slot in best
            ]
            assert [one["cosine"] for one in near] == pytest.approx(
                [cosines[slot] for slot in best], abs=1e-3
            )
        assert told["seen"].startswith("data:image/")


def test_the_searched_picture_comes_first_although_its_row_is_old() -> None:
    memory = WorkingMemory(16, 8, image_shape=(3, SIDE, SIDE), seed=0)
    image_BCHW = torch.randint(0, 256, (12, 3, SIDE, SIDE), dtype=torch.uint8)
    hashes = torch.from_numpy(content_hashes(image_BCHW.permute(0, 2, 3, 1).contiguous().numpy()))
    hashes[3] = hashes[7]  # a copy
    image_BCHW[3] = image_BCHW[7]
    old_BD = -encode(image_BCHW)[0]  # an encoder that has changed much since
    memory.add(torch.arange(12), old_BD, image_BCHW, hashes=hashes)
    near = PictureSearch(memory, decode, encode).nearest(image_BCHW[7], 4)["embedding"]
    assert near[:2] == [(3, 1.0), (7, 1.0)]
    assert len({slot for slot, _ in near}) == len(near) == 4
    assert PictureSearch(memory, decode, encode).nearest(image_BCHW[7], 1)["embedding"] == near[:1]


def test_a_search_changes_neither_the_memory_nor_the_random_state(
    world: tuple[str, Feed, Any],
) -> None:
    address, feed, view = world
    before = {name: value.clone() for name, value in feed.memory.state_dict().items()}
    random, spent = torch.get_rng_state(), view.jobs.spent
    assert asked(address, png(np.zeros((9, 9, 3), np.uint8))).status_code == 200
    after = feed.memory.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert view.jobs.spent > spent  # it counts against the page's share of the time


def truncated() -> bytes:
    return png(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))[:700]


def bomb() -> bytes:
    return png(np.zeros((6000, 6000), np.uint8))


def tiff() -> bytes:
    return png(np.zeros((9, 9, 3), np.uint8), "TIFF")


BAD: list[tuple[Callable[[], bytes], int, str]] = [
    (lambda: b"", 400, "the body is empty"),
    (lambda: b"not a picture", 400, "the picture cannot be used"),
    (lambda: b"\x89PNG\r\n\x1a\n" + b"\xff" * 900, 400, "the picture cannot be used"),
    (lambda: b"\xff\xd8\xff" + bytes(900), 400, "the picture cannot be used"),
    (truncated, 400, "the picture cannot be used"),
    (bomb, 400, "pixels"),
    (tiff, 400, "the picture cannot be used"),
    (lambda: b"<svg onload='alert(1)'/>", 400, "the picture cannot be used"),
    (lambda: bytes(MOST_PICTURE + 1), 413, "more than 8388608 bytes"),
]


@pytest.mark.parametrize(("data", "status", "says"), BAD)
def test_bad_pictures_are_refused_and_the_search_goes_on(
    world: tuple[str, Feed, Any], data: Callable[[], bytes], status: int, says: str
) -> None:
    reply = asked(world[0], data())
    assert (reply.status_code, says in reply.json()["error"]) == (status, True), reply.text
    assert asked(world[0], png(np.zeros((9, 9, 3), np.uint8))).status_code == 200  # it goes on


def test_other_websites_cannot_post(world: tuple[str, Feed, Any]) -> None:
    """Browsers send only these content types without asking. Other hosts are refused."""
    address, good = world[0], png(np.zeros((9, 9, 3), np.uint8))
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""):
        reply = asked(address, good, **{"content-type": kind})
        assert reply.status_code == 415, kind
        assert BYTES in reply.json()["error"]
    assert asked(address, good, host="evil.example").status_code == 403
    assert asked(address, good, "?count=0").status_code == 400
    assert asked(address, good, "?k=3").status_code == 400


def test_a_receiver_forwards_a_picture(world: tuple[str, Feed, Any]) -> None:
    good = png(np.zeros((9, 9, 3), np.uint8))
    sources = Sources(run=Path("runs/x"), peer={"learner": world[0]}.get)
    with receiving(ProducerTable(limit=4), sources=sources) as receiver:
        forwarded = asked(receiver.address, good, "?count=3")
        assert forwarded.json() == asked(world[0], good, "?count=3").json()
        assert asked(receiver.address, b"nothing").status_code == 400
    alone = Sources(run=Path("runs/x"))
    with receiving(ProducerTable(limit=4), sources=alone) as receiver:
        assert asked(receiver.address, good).status_code == 502


def test_slow_senders_hold_at_most_two_places_of_the_search(world: tuple[str, Feed, Any]) -> None:
    """The places are free again after the senders end."""
    address = world[0]
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def slowly() -> Iterator[bytes]:
        begun.release()  # the headers were sent
        yield b"\x89PNG"
        goes_on.wait(8)
        yield b"end"

    def post() -> None:
        with httpx.Client(trust_env=False, timeout=30) as client:
            url = f"{address}/api/learner/memory/search"
            client.post(url, content=slowly(), headers=HEADERS)

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=30)
    good = png(np.zeros((9, 9, 3), np.uint8))
    codes = set()
    for _ in range(200):
        codes.add(asked(address, good).status_code)
        if 503 in codes:
            break
    goes_on.set()
    for thread in threads:
        thread.join()
    assert 503 in codes
    assert asked(address, good).status_code == 200


def test_a_memory_without_pictures_refuses_a_search() -> None:
    with serving(Feed(8)) as (server, _):  # nobody has set a search
        reply = asked(server.address, png(np.zeros((9, 9, 3), np.uint8)))
        assert (reply.status_code, "keeps no pictures" in json.loads(reply.text)["error"]) == (
            404,
            True,
        )


def test_the_documented_proxy_passes_the_largest_picture_on() -> None:
    page = (Path(__file__).parents[2] / "docs" / "page.md").read_text()
    assert f"client_max_body_size {MOST_PICTURE >> 20}m;" in page.partition("```nginx")[2]
