"""The files of a TLS connection: a file that cannot be used is named with its option."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from table import table

from stream_ssl.producers.sources.nats_consumer import TlsFiles, tls_arguments
from stream_ssl.producers.sources.tls import tls_context

NO_FILE, NO_PEM = Path("/none.pem"), Path(__file__)


@table(("file", "reason"), [(NO_FILE, "No such file or directory"), (NO_PEM, ".*no certificate.*")])
def test_a_file_of_authorities_must_be_a_pem_file(file: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"tls_ca {file}: {reason}; give a PEM file"):
        tls_context("tls_ca", file)


@table(
    ("files", "message"),
    [
        (TlsFiles(tls_ca=NO_FILE), f"tls_ca {NO_FILE}: No such file"),
        (TlsFiles(tls_key=NO_FILE), "tls_certificate and tls_key belong together"),
        (
            TlsFiles(tls_certificate=NO_FILE, tls_key=NO_PEM),
            f"tls_certificate {NO_FILE}, tls_key {NO_PEM}: No such file .*; give PEM files of one",
        ),
    ],
)
def test_the_error_names_a_tls_file_that_nats_cannot_use(files: TlsFiles, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tls_arguments("nats://broker:4222", files)


def test_nats_uses_tls_only_if_an_argument_requests_tls() -> None:
    assert tls_arguments("nats://broker:4222", TlsFiles()) == {}
    context = tls_arguments("tls://broker:4222", TlsFiles())["tls"]
    assert context.verify_mode == ssl.CERT_REQUIRED
