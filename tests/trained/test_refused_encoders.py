"""The encoders that are refused: absent, damaged, of another network, or with false claims."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from table import table

import stream_ssl
from stream_ssl.durable import seal
from stream_ssl.trained import encoder as encoders


def test_load_encoder_refuses_missing_damaged_and_misconfigured_encoders(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        stream_ssl.load_encoder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match='choose "features" or "embeddings"'):
        stream_ssl.load_encoder(exported, of="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used"):
        stream_ssl.load_encoder(exported, device="cuda:99")
    config = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["config"]
    with pytest.raises(
        ValueError, match=r"the checkpoint's configuration cannot be read: .*colour"
    ):
        encoders.stored_settings(config | {"encoder": {"colour": 3}})
    for memory in (None, [1]):
        with pytest.raises(ValueError, match=r"configuration cannot be read: memory is .* a map"):
            encoders.stored_settings(config | {"memory": memory})
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    with (copy / "encoder.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"the encoder in .* is damaged .*; export it again"):
        stream_ssl.load_encoder(copy)


def test_weights_of_another_network_are_refused(run: Path, exported: Path, tmp_path: Path) -> None:
    """A change to the user's own network has this effect."""
    for place, name in ((run / "checkpoints" / "latest", "state.json"), (exported, "encoder.json")):
        copy = tmp_path / name
        shutil.copytree(place, copy)
        text = (copy / name).read_text()
        (copy / name).write_text(re.sub(r'("width"): \d+', r"\1: 6", text))
        (copy / "manifest.json").unlink()
        seal(copy)
        with pytest.raises(ValueError, match=r"weights in .* do not fit .*size mismatch.*: use"):
            stream_ssl.load_encoder(copy)


def described(exported: Path, folder: Path, **changes: Any) -> Path:
    """A sealed copy of an export with other values in its encoder.json."""
    shutil.copytree(exported, folder)
    told = json.loads((folder / "encoder.json").read_text()) | changes
    (folder / "encoder.json").write_text(json.dumps(told))
    (folder / "manifest.json").unlink()
    seal(folder)
    return folder


@table(
    ("changes", "message"),
    [
        ({"encoder": {"width": 4096, "depths": [1] * 4}}, "do not fit the network"),
        ({"projector": {"dim": 1 << 31, "hidden": 1 << 20}}, "do not fit the network"),
        ({"projector": [1]}, r"projector is \[1\], and must be of type dict"),
        ({"vectors": [1]}, r"vectors is \[1\], and must be of type dict"),
        ({"statistics": "none"}, "statistics is 'none', and must be one of average, batch"),
        (
            {"decoder": {"size": 10**9, "channels": 3, "max_pixels": 10**18, "fit": "crop"}},
            "size 1000000000: must be from 1 to 8,192",
        ),
    ],
    ids=["width", "projector", "projector's type", "vectors' type", "statistics", "size"],
)
def test_the_claims_of_an_export_are_checked_before_memory_is_allocated(
    exported: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copy = described(exported, tmp_path / "copy", **changes)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        with pytest.raises(ValueError, match=message):
            stream_ssl.load_encoder(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
