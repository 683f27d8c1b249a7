from __future__ import annotations

import errno
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stream_ssl import tensor_file
from stream_ssl.tensor_file import write_tensors

TENSORS = {
    "weights": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "double": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.arange(7, dtype=torch.float16),
    "ids": torch.arange(6).reshape(2, 3).T,
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "none": torch.empty(0, 4),
    "learned": torch.ones(2, requires_grad=True),
}


def _types() -> int:
    gc.collect()
    return sum(issubclass(type(one), type) for one in gc.get_objects())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_tensors_are_loaded_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = TENSORS | {"other": torch.randn(4).to(dtype)}
    tensors["tied"] = tensors["other"]  # the same memory
    write_tensors(tensors, tmp_path / "tensors")
    read = load_file(tmp_path / "tensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_write_tensors_writes_the_same_bytes_as_safetensors(tmp_path: Path) -> None:
    write_tensors(TENSORS, tmp_path / "ours")
    whole = {name: tensor.detach().contiguous() for name, tensor in TENSORS.items()}
    save_file(whole, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_write_tensors_keeps_no_type_for_each_size_in_memory(tmp_path: Path) -> None:
    write_tensors({"rows": torch.zeros(1, dtype=torch.uint8)}, tmp_path / "tensors")
    before = _types()
    for size in range(2, 52):
        write_tensors({"rows": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "tensors")
    assert _types() - before < 5


def test_write_tensors_raises_oserror_for_an_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        write_tensors(TENSORS, tmp_path / "absent" / "tensors")


def test_tensors_can_be_stored_in_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9" / "tensors"
    path.parent.mkdir()
    for dtype in (torch.float32, torch.bfloat16):
        write_tensors({"other": torch.ones(4, dtype=dtype)}, path)
        assert torch.equal(tensor_file.load_file(path)["other"], torch.ones(4, dtype=dtype))
        assert tensor_file.names_in(path) == ["other"]
    with pytest.raises(FileNotFoundError):
        tensor_file.load_file(path.with_name("nothing"))


def test_errors_of_safetensors_keep_the_number_of_the_system_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tensors"
    write_tensors({"other": torch.ones(4)}, path)
    numbers = iter((errno.EMFILE, errno.ENODEV) * 2)
    for read in (tensor_file.load_file, tensor_file.names_in):
        with pytest.raises(FileNotFoundError) as missing:
            read(tmp_path / "nothing")
        assert missing.value.errno == errno.ENOENT

    def refuse(*_: object) -> None:
        raise OSError(f"In safetensors (os error {next(numbers)})")  # without errno

    monkeypatch.setattr(tensor_file.safetensors.torch, "load_file", refuse)
    monkeypatch.setattr(tensor_file, "safe_open", refuse)
    with pytest.raises(OSError) as error:
        tensor_file.load_file(path)
    assert (error.value.errno, error.value.filename) == (errno.EMFILE, str(path))
    assert tensor_file.load_file(path).keys() == {"other"}  # such a file system maps no files
    with pytest.raises(OSError) as error:
        tensor_file.names_in(path)
    assert error.value.errno == errno.EMFILE
    assert tensor_file.names_in(path) == ["other"]


def test_a_lack_of_descriptors_is_not_reported_as_a_missing_file(tmp_path: Path) -> None:
    write_tensors({"other": torch.ones(4)}, tmp_path / "tensors")
    program = """
import os, resource, sys, torch
from pathlib import Path
from stream_ssl import tensor_file
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for read in (tensor_file.load_file, tensor_file.names_in):
    try:
        read(Path(sys.argv[1]))
    except OSError as error:
        print(error.errno)
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "tensors")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(errno.EMFILE)] * 2, done.stderr
