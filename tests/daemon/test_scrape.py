"""The scraper of /metrics, and the history of the values."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stream_ssl.observe import scrape
from stream_ssl.observe.scrape import History, Scraper, Snapshot, key, parse


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Counter("stream_ssl_received_samples", "", registry=registry).inc(7)
    Gauge("stream_ssl_memory_class_slots", "", ["memory", "class"], registry=registry).labels(
        "queue", "3"
    ).set(5)
    Histogram("stream_ssl_journal_fsync_seconds", "", registry=registry).observe(0.5)
    Gauge("process_resident_memory_bytes", "", registry=registry).set(1e6)
    return registry


def test_parse_keeps_counters_gauges_and_sums(registry):
    values = parse(generate_latest(registry).decode(), "receiver")
    assert values["stream_ssl_received_samples_total"] == 7
    assert values['stream_ssl_memory_class_slots{class="3",memory="queue"}'] == 5
    assert values["stream_ssl_journal_fsync_seconds_sum"] == 0.5
    assert values["stream_ssl_journal_fsync_seconds_count"] == 1


def test_parse_labels_process_metrics_by_job_and_drops_buckets(registry):
    values = parse(generate_latest(registry).decode(), "learner")
    assert values['process_resident_memory_bytes{job="learner"}'] == 1e6
    assert not [name for name in values if "_bucket" in name or "_created" in name]


@pytest.fixture
def address(registry):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = generate_latest(registry) if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_scraper_leaves_out_processes_that_do_not_answer(address):
    times = iter([100.0, 102.5])
    urls = {"receiver": address, "learner": "http://127.0.0.1:1"}
    snapshot = Scraper(lambda: urls, timeout=60, clock=lambda: next(times)).scrape()
    assert snapshot.up == ("receiver",)
    assert snapshot.time == 2.5
    assert snapshot.values["stream_ssl_received_samples_total"] == 7


def test_the_scraper_leaves_out_a_page_with_an_error_status(address):
    urls = {"receiver": f"{address}/elsewhere"}
    snapshot = Scraper(lambda: urls, timeout=60).scrape()
    assert (snapshot.up, snapshot.values) == ((), {})


@pytest.mark.parametrize(
    "body", [b"<p>{x}</p>", b"\xff", b"stream_ssl_step many\n", b'a{x="1", ="2"} 3\n']
)
def test_the_scraper_leaves_out_the_page_of_another_program(body, monkeypatch):
    monkeypatch.setattr(scrape, "ask", lambda *_: (200, body))
    snapshot = Scraper(lambda: {"learner": "http://127.0.0.1:1"}).scrape()
    assert (snapshot.up, snapshot.values) == ((), {})


def history(*points: tuple[float, dict[str, float]]) -> History:
    return History([Snapshot(time, values) for time, values in points])


def test_a_rate_is_the_increase_of_a_counter_per_second():
    counted = history(*((float(t), {"a_total": 10.0 * t}) for t in range(20)))
    assert counted.rate("a_total") == pytest.approx(10)
    assert counted.rates("a_total")[-1] == (19.0, pytest.approx(10))
    assert counted.rate("missing_total") == 0


def test_a_counter_that_starts_again_gives_no_negative_rate():
    counted = history((0, {"a_total": 0}), (1, {"a_total": 10}), (2, {"a_total": 4}))
    assert counted.total("a_total") == 14
    assert counted.rate("a_total") == pytest.approx(7)


def test_the_first_value_of_a_counter_counts_in_its_total():
    assert history((3, {"a_total": 6})).total("a_total") == 6
    assert history().total("a_total") == 0


def test_last_returns_the_newest_value_before_a_gap():
    counted = history((0, {"g": 1.0}), (1, {"g": 2.0}), (2, {}))
    assert counted.last("g") == 2
    assert counted.last("h") == 0
    assert counted.series("g") == [(0, 1.0), (1, 2.0)]


def test_labels_are_found_in_any_order():
    counted = history((0, {key("m", {"b": "2", "a": "1"}): 3.0}))
    assert counted.last("m", b="2", a="1") == 3
    assert counted.has("m", a="1", b="2")


def test_a_history_is_saved_as_lines_of_json(tmp_path):
    counted = History([Snapshot(1.5, {'m{a="1"}': 2.0}, ("learner",))])
    counted.save(tmp_path / "history.jsonl")
    (line,) = (tmp_path / "history.jsonl").read_text().splitlines()
    assert json.loads(line) == {"time": 1.5, "up": ["learner"], "values": {'m{a="1"}': 2.0}}
