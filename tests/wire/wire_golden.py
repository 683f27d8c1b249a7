"""The golden messages: docs/wire.md shows the same hex."""

from __future__ import annotations

import numpy as np

from stream_ssl.wire import Ack, Bye, Data, Hello, Message, Nack, Sample, Welcome
from stream_ssl.wire.messages import Verdict, Verdicts

DATA = Data.pack(
    42,
    [
        Sample("a", bytes(range(4)), "raw", (2, 2, 1), 1700000000.5, "camera-1", label=3),
        Sample("b", b"\xff\xd8\xff\xd9", "jpeg", None, 1700000001.0, "camera-1", meta={"gain": 2}),
    ],
    position=[2, 11],
)

VECTOR = Data.pack(
    43,
    [Sample.from_vector(np.array([1, -0.5], np.float32), "v", time=1700000002.0, source="robot-1")],
)

GOLDEN: dict[str, tuple[Message, tuple[str, ...]]] = {
    "HELLO": (
        Hello("camera-1", 1700000000000000000, 1, ("raw", "jpeg"), "demo 1"),
        (
            "53530101",
            (
                "85a870726f6475636572a863616d6572612d31a565706f6368cf17979cfe362a0000a5666972737401"
                "a6636f6465637392a3726177a46a706567a56167656e74a664656d6f2031"
            ),
        ),
    ),
    "HELLO_VERDICTS": (
        Hello("camera-1", 1700000000000000000, 1, ("raw", "jpeg"), "demo 1", verdicts=True),
        (
            "53530101",
            (
                "86a870726f6475636572a863616d6572612d31a565706f6368cf17979cfe362a0000a56669727374"
                "01a6636f6465637392a3726177a46a706567a56167656e74a664656d6f2031a87665726469637473"
                "c3"
            ),
        ),
    ),
    "HELLO_CLOCK": (
        Hello("camera-1", 1700000000000000000, 1, ("raw", "jpeg"), "demo 1", clock=1700000060.5),
        (
            "53530101",
            (
                "86a870726f6475636572a863616d6572612d31a565706f6368cf17979cfe362a0000a566697273"
                "7401a6636f6465637392a3726177a46a706567a56167656e74a664656d6f2031a5636c6f636bcb"
                "41d954fc4f200000"
            ),
        ),
    ),
    "WELCOME": (
        Welcome(
            41,
            [2, 9],
            16777216,
            8388608,
            1024,
            ("raw", "jpeg", "png", "webp"),
            1700000000000000001,
        ),
        (
            "53530102",
            (
                "87a6726573756d6529a8706f736974696f6e920209a6637265646974ce01000000aa6d61785f7061"
                "636b6574ce00800000ab6d61785f73616d706c6573cd0400a6636f6465637394a3726177a46a7065"
                "67a3706e67a477656270a565706f6368cf17979cfe362a0001"
            ),
        ),
    ),
    "WELCOME_WRITTEN": (
        Welcome(41, [2, 9], 0, 8388608, 1024, ("raw",), 1700000000000000001, 1700000002.5),
        (
            "53530102",
            (
                "88a6726573756d6529a8706f736974696f6e920209a663726564697400aa6d61785f7061636b6574"
                "ce00800000ab6d61785f73616d706c6573cd0400a6636f6465637391a3726177a565706f6368cf17"
                "979cfe362a0001a77772697474656ecb41d954fc40a00000"
            ),
        ),
    ),
    "DATA": (
        DATA,
        (
            "53530103",
            "000000000000002a92c6b383",
            (
                "83a6736f75726365a863616d6572612d31a8706f736974696f6e92020ba773616d706c65739286a2"
                "6964a161a474696d65cb41d954fc40200000a5636f646563a3726177a473697a6504a57368617065"
                "93020201a56c6162656c0385a26964a162a474696d65cb41d954fc40400000a5636f646563a46a70"
                "6567a473697a6504a46d65746181a46761696e02"
            ),
            "00010203ffd8ffd9",
        ),
    ),
    "VECTOR": (
        VECTOR,
        (
            "53530103",
            "000000000000002b0da3ac1c",
            (
                "83a6736f75726365a7726f626f742d31a8706f736974696f6ec0a773616d706c65739186a26964a1"
                "76a474696d65cb41d954fc40800000a5636f646563a6766563746f72a473697a6508a57368617065"
                "9102a56474797065a7666c6f61743332"
            ),
            "0000803f000000bf",
        ),
    ),
    "ACK": (
        Ack(42, 16777216),
        ("53530104", "82a77468726f7567682aa6637265646974ce01000000"),
    ),
    "NACK": (
        Nack(42, "gap", "expected 42", permanent=False),
        (
            "53530105",
            (
                "84a873657175656e63652aa6726561736f6ea3676170a664657461696cab65787065637465642034"
                "32a97065726d616e656e74c2"
            ),
        ),
    ),
    "BYE": (Bye("closed"), ("53530106", "81a6726561736f6ea6636c6f736564")),
    "VERDICTS": (
        Verdicts(
            (
                Verdict("camera-1", "a", "kept", 0.5, near=True),
                Verdict("camera-1", "b", "evicted", age=4096),
            )
        ),
        (
            "53530107",
            (
                "81a4726f77739296a863616d6572612d31a161a46b657074cb3fe0000000000000c3c096a863616d"
                "6572612d31a162a765766963746564c0c2cd1000"
            ),
        ),
    ),
}
