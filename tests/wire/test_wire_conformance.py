"""`stream-ssl conform`: keeps a good producer's rules apart from a faulty one's."""

import contextlib
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mini_producer import FAULTS, MiniProducer

from stream_ssl.app.cli import main
from stream_ssl.conformance import RULES, tried
from stream_ssl.producers import Producer, ProducerError


def python_client(address):
    """Our client in a thread, with a source that goes on at its position."""
    ended = threading.Event()
    producer = Producer(address, "tried", packet_samples=4, linger=0.02, buffer_bytes=4096)

    def run():
        try:
            number = producer.connect(30.0).position or 0
            while not ended.is_set():
                number += 1
                producer.send(np.zeros((4, 4), np.uint8), id=str(number), position=number)
                ended.wait(0.002)
        except ProducerError:
            pass

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        ended.set()
        with contextlib.suppress(ProducerError):
            producer.close(0.0)
        thread.join()

    return end


def test_good_producers_keep_every_rule_and_each_fault_breaks_its_own():
    good = [(rule, python_client) for rule in RULES]
    good += [(rule, lambda address: MiniProducer(address).end) for rule in RULES]
    faulty = [
        (rule, lambda address, fault=fault: MiniProducer(address, fault).end)
        for fault, rule in FAULTS.items()
    ]
    assert set(FAULTS.values()) == set(RULES)
    jobs = sorted(good + faulty, key=lambda job: job[0] not in ("silence", "stop"))
    with ThreadPoolExecutor(24) as pool:  # trials wait most of their time
        results = dict(zip(jobs, pool.map(lambda job: tried(*job), jobs), strict=True))
    assert [results[job] for job in good if not results[job].kept] == []
    found = [results[job] for job in faulty]
    kept = [fault for fault, one in zip(FAULTS, found, strict=True) if one.kept is not False]
    assert kept == []
    assert all(one.why for one in found)


def test_the_page_lists_the_rules():
    page = Path("docs/wire.md").read_text()
    listed = re.findall(r"^ - \[ \] `([a-z-]+)`", page.partition("## Conformance")[2], re.M)
    assert listed == list(RULES)


def test_the_command_tells_of_each_rule_and_fails_where_one_is_broken(capfd, monkeypatch):
    silent = [sys.executable, "-c", "import time; time.sleep(60)", "ADDRESS"]
    monkeypatch.setattr("stream_ssl.conformance.PATIENCE", 0.5)
    assert main(["conform", "--rules", "framing", "--", *silent]) == 1
    said = capfd.readouterr().out
    assert "BROKEN     framing" in said
    assert "0 rules kept, 1 broken, 0 not tested" in said


def test_a_producer_that_ends_by_itself_is_named_with_its_status(capfd, monkeypatch):
    crashed = [sys.executable, "-c", "raise SystemExit(7)", "ADDRESS"]
    monkeypatch.setattr("stream_ssl.conformance.PATIENCE", 2.0)
    assert main(["conform", "--rules", "framing", "--", *crashed]) == 1
    assert "no HELLO within 2 s; the producer had ended: status 7" in capfd.readouterr().out


def test_a_producer_that_cannot_be_started_is_named(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["conform", "--rules", "framing", "--", "./no-such-producer", "ADDRESS"])
    assert "./no-such-producer is not a program that can be started" in capfd.readouterr().err
