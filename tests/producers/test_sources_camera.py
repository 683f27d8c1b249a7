"""Live streams: reconnects, waiting frames, capture times, ends. test_rtsp.py has RTSP."""

import contextlib
import errno
import io
import itertools
import logging
import os
import re
import socket
import threading
import time
import wave
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av
import numpy as np
import pytest
from going_on import check_stop_ends
from source_files import encoded
from table import table
from video_files import number_of, numbered, write_video
from waiting import until

from stream_ssl.producers.sources import Camera
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.camera import CaptureClock


@contextmanager
def http_camera(serve):
    """A server on loopback; `serve(handler, number)` answers the request of that number."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            serve(self, len(self.server.asked))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.ended = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server, f"http://robot:secret@127.0.0.1:{server.server_port}/live"
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def stream_bytes(folder, frames=30):
    return write_video(folder / "live.ts", frames).read_bytes()


def answer(handler, data, more=0):
    """Send data, and announce the given number of further bytes."""
    handler.send_response(200)
    handler.send_header("Content-Type", "video/mp2t")
    handler.send_header("Content-Length", str(len(data) + more))
    handler.end_headers()
    handler.wfile.write(data)
    handler.wfile.flush()


def taken(source, count):
    stream = source.samples()
    samples = [sample for sample, _ in (next(stream) for _ in range(count))]
    source.stop()
    assert list(stream) == []
    return samples


def test_the_camera_source_reconnects_to_a_lost_stream(tmp_path, caplog):
    data = stream_bytes(tmp_path)

    def serve(handler, number):
        if number in (1, 3):
            return handler.send_error(503)
        return answer(handler, data if number != 4 else b"")

    with http_camera(serve) as (server, url), caplog.at_level(logging.INFO):
        source = Camera(url, retry_seconds=0.01, codec="raw", waiting=100)
        began = time.time()
        samples = taken(source, 60)
    assert [number_of(sample) for sample in samples] == [*range(30), *range(30)]
    assert len({sample.id for sample in samples}) == 60
    assert all(began - 5 < sample.time < time.time() for sample in samples)
    assert len(server.asked) >= 5
    at = f"no frames: http://127.0.0.1:{server.server_port}: "
    remedy = " (check that the camera is on, and its address, user and password); trying again in"
    assert f"{at}Server returned 5XX" in caplog.text
    assert f"{at}the stream ended{remedy}" in caplog.text
    assert re.search(r"source camera: connected: h264, \d+ x \d+\n", caplog.text)
    assert "secret" not in caplog.text
    assert source.skipped.by_reason == {}


@table("longest", [10.0, 0.2])
def test_the_log_states_the_pause_before_each_new_attempt(caplog, longest):
    """Each camera draws its own pause, so that cameras do not all reconnect at once."""

    def serve(handler, number):
        handler.send_error(503)

    with http_camera(serve) as (_, url), caplog.at_level(logging.WARNING):
        source, waited = Camera(url, retry_seconds=longest), []

        class Stopped(threading.Event):
            def wait(self, timeout=None):
                waited.append(timeout)
                if len(waited) == 4:
                    source.stop()
                return True

        source._stopped = source._ready.stopped = Stopped()
        assert list(source.samples()) == []
    told = re.findall(r"trying again in (\S+) s", caplog.text)
    assert told == [f"{seconds:.1f}" for seconds in waited]
    assert max(waited) <= longest


def test_a_stream_that_ends_after_each_frame_does_not_fill_the_log(caplog):
    snapshot = encoded(numbered(1), "JPEG")

    serve = http_camera(lambda handler, _: answer(handler, snapshot))
    with serve as (_, url), caplog.at_level(logging.INFO):
        assert len(taken(Camera(url, retry_seconds=0.01, waiting=100), 30)) == 30
    assert len(caplog.messages) <= 21


def test_the_camera_source_turns_off_the_log_of_ffmpeg():
    snapshot = encoded(numbered(1), "JPEG")
    av.logging.set_level(av.logging.ERROR)  # as torchvision before 0.26 does
    with http_camera(lambda handler, _: answer(handler, snapshot)) as (_, url):
        assert len(taken(Camera(url), 1)) == 1
    assert av.logging.get_level() is None


def test_a_silent_stream_is_closed_and_opened_again(tmp_path):
    data = stream_bytes(tmp_path)

    def serve(handler, number):
        answer(handler, data if number > 1 else data[:100], more=1)
        handler.server.ended.wait(120)

    with http_camera(serve) as (server, url):
        source = Camera(url, timeout=2, retry_seconds=0.01, codec="raw", waiting=100)
        samples = taken(source, 20)
        assert [number_of(sample) for sample in samples] == list(range(20))
        assert len(server.asked) == 2


def test_a_stream_that_changes_its_codec_is_opened_again(tmp_path):
    before = stream_bytes(tmp_path)
    after = write_video(tmp_path / "after.ts", 30, "mpeg2video").read_bytes()

    def serve(handler, number):
        answer(handler, before if number == 1 else after, more=10**9)
        while number == 1 and not handler.server.ended.wait(0.1):
            handler.wfile.write(after)

    with http_camera(serve) as (_, url):
        source = Camera(url, timeout=1, retry_seconds=0.01, codec="raw", waiting=100)
        samples = taken(source, 50)
    first = samples[0].id.split("-")[0]
    again = [number_of(one) for one in samples if not one.id.startswith(first)]
    assert len(again) >= 20
    assert again == list(range(len(again)))
    assert source.skipped.by_reason["undecodable"] > 0


@table("gives_up", [False, True])
def test_the_source_waits_for_the_first_key_frame_of_a_stream(tmp_path, gives_up):
    """A camera may send a key frame only each minute, and start at any place at each opening."""
    data = write_video(tmp_path / "live.ts", 30, gop=300).read_bytes()
    later = data[len(data) // 376 * 188 :]

    def serve(handler, _number):
        answer(handler, later, more=10**9)
        for _ in range(100 if gives_up else 65):
            if handler.server.ended.wait(0.1):
                return
            handler.wfile.write(later)
        handler.wfile.write(data * 9)
        handler.server.ended.wait(20)

    with http_camera(serve) as (_, url):
        limits = {"timeout": 5, "retry_seconds": 0.01, "give_up_seconds": 3 if gives_up else None}
        source = Camera(url, codec="raw", waiting=100, **limits)
        if gives_up:
            with pytest.raises(
                SourceError, match=r"no frame for .*choose another codec or more key"
            ):
                taken(source, 1)
        else:
            assert number_of(taken(source, 1)[0]) == 0  # a connection lasted for longer than 6 s
        assert source.skipped.by_reason["undecodable"] > 0


def test_frames_in_the_decoder_are_sent_when_a_stream_breaks(tmp_path):
    data = stream_bytes(tmp_path)  # with B frames, so the decoder holds some back

    with http_camera(lambda handler, _: answer(handler, data, more=1)) as (_, url):
        samples = taken(Camera(url, retry_seconds=0.01, codec="raw", waiting=100), 60)
    assert [number_of(sample) for sample in samples] == [*range(30), *range(30)]
    assert all(abs(sample.time - time.time()) < 60 for sample in samples)


def test_the_oldest_waiting_frames_are_dropped_when_the_sender_is_slow(tmp_path, caplog):
    data, sent = stream_bytes(tmp_path), threading.Event()

    def serve(handler, number):
        if number == 1:
            answer(handler, data)
        sent.set()
        handler.server.ended.wait(120)

    with http_camera(serve) as (_, url), caplog.at_level(logging.WARNING):
        source = Camera(url, retry_seconds=0.01, waiting=4, codec="raw")
        stream = source.samples()
        first = number_of(next(stream)[0])
        # All thirty may have come before the first is taken: then one more is late.
        all_came_first = first == 26
        until(lambda: source.skipped.by_reason["late"] >= 25 + all_came_first)
        rest = [number_of(next(stream)[0]) for _ in range(4 - all_came_first)]
        source.stop()
    assert rest == [26, 27, 28, 29][all_came_first:]
    assert "the oldest frame that waits" in caplog.text
    assert "raise waiting if frames come in bursts" in caplog.text


def test_truncated_frames_of_motion_jpeg_are_left_out(tmp_path):
    def serve(handler, _number):
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        handler.end_headers()
        for number in range(12):
            data = encoded(numbered(number), "JPEG")
            if number in (3, 6):  # FFmpeg alone would fill the rest with grey
                data = data[: len(data) * (6 + number // 2) // 10]
            if number == 8:  # a camera that pads its frames loses no picture
                data = data[:-2] + bytes(9)
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
            handler.wfile.write(head.encode() + data + b"\r\n")

    with http_camera(serve) as (_, url):
        source = Camera(url, waiting=100, retry_seconds=0.01)
        samples = taken(source, 10)
    assert [number_of(sample) for sample in samples] == [0, 1, 2, 4, 5, 7, 8, 9, 10, 11]
    assert source.skipped.by_reason["undecodable"] >= 2


def test_frames_without_times_are_dated_when_they_arrive():
    """FFmpeg would count 25 frames a second, which dated slow frames up to two seconds early."""

    def serve(handler, _number):
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        handler.end_headers()
        for number in range(50):
            data = encoded(numbered(number), "JPEG")
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
            handler.wfile.write(head.encode() + data + b"\r\n")
            if number > 30 and handler.server.ended.wait(
                0.1
            ):  # FFmpeg gets the frames that it probes at once
                return

    with http_camera(serve) as (_, url):
        samples = taken(Camera(url, waiting=100), 45)
    assert samples[44].time - samples[34].time > 0.9  # at 25 frames a second it would be 0.4


def test_stop_ends_a_source_whose_camera_is_silent():
    def serve(handler, _number):
        handler.server.ended.wait(120)

    with http_camera(serve) as (server, url):
        check_stop_ends(Camera(url, timeout=120), waits=lambda: server.asked)


def test_the_reading_thread_ends_when_its_stream_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.live.END_SECONDS", 60.0)
    data = stream_bytes(tmp_path)

    def serve(handler, _number):
        answer(handler, data, more=1)
        handler.server.ended.wait(0.3)  # while FFmpeg waits

    with http_camera(serve) as (_, url):
        stream = Camera(url, retry_seconds=0.01, name="left").samples()
        next(stream)
        stream.close()
        assert not any(one.name == "live left" for one in threading.enumerate())


def sound():
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 2, 8000, 0, "NONE", ""))
        wav.writeframes(bytes(16_000))
    return file.getvalue()


@table(
    ("body", "why"),
    [
        (b"", "Invalid data"),
        (b"no video " * 1000, "Invalid data .*check the path of the address.*single pictures"),
        (b"\x47" + b"\xff" * 20_000, "Invalid data"),
        (sound(), "there is no video in it"),
        (403, "Server returned 403 Forbidden"),
        (404, "Server returned 404 Not Found"),
        (500, "Server returned 5XX"),
    ],
)
def test_the_source_gives_up_an_address_without_video_and_names_the_cause(body, why):
    def serve(handler, _number):
        answer(handler, body) if isinstance(body, bytes) else handler.send_error(body)

    with http_camera(serve) as (_, url):
        source = Camera(url, retry_seconds=0.01, give_up_seconds=0.2)
        with pytest.raises(SourceError, match=rf"source 'camera': no frame for \d+ s: .*({why})"):
            next(source.samples())


def test_a_camera_whose_frames_are_all_left_out_is_not_given_up():
    pictures = [encoded(np.full((64, 64, 3), level, np.uint8), "JPEG") for level in (0, 255)]

    def serve(handler, number):
        part = b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + pictures[number % 2] + b"\r\n"
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(part)
            handler.server.ended.wait(0.05)

    with http_camera(serve) as (_, url):
        source = Camera(url, retry_seconds=0.01, give_up_seconds=1.0, scene_change=0.5)
        assert len(taken(source, 2)) == 2  # the first frame of each connection


@table(("limit", "most"), [({"scene_change": 0.5}, 1), ({"fps": 0.01}, 2)])
def test_fps_and_scene_change_apply_across_connections(limit, most):
    """A camera may give a single picture at each request."""
    picture = encoded(numbered(1), "JPEG")
    with http_camera(lambda handler, _: answer(handler, picture)) as (server, url):
        source = Camera(url, retry_seconds=0.01, waiting=100, **limit)

        def stop():
            until(lambda: len(server.asked) >= 10)
            source.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        samples = list(source.samples())
        thread.join()
    assert 1 <= len(samples) <= most


def rtsp(status="200 OK", body="", **headers):
    """Return an answer. An underscore in a header's name stands for a hyphen."""
    lines = [f"RTSP/1.0 {status}", "CSeq: NUMBER", "Session: 1", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1")


def described(media):
    """Return the answers of a server of this media. Its title is not UTF-8."""
    session = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=caf\xe9\r\nt=0 0\r\n"
    return {
        "DESCRIBE": rtsp(body=session + media, Content_Type="application/sdp"),
        "SETUP": rtsp(Transport="RTP/AVP/TCP;unicast;interleaved=0-1"),
        "*": rtsp(),
    }


@contextmanager
def rtsp_host(answers):
    """A server that answers by method, with "*" for other methods. Without answers it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"rtsp://robot:secret@127.0.0.1:{listening.getsockname()[1]}/x"

        def talk(peer):
            with contextlib.suppress(OSError), peer, peer.makefile("rb") as lines:
                asked = b""
                for line in lines:
                    asked += line
                    if line == b"\r\n":
                        said = answers.get(asked.split()[0].decode(), answers.get("*", b""))
                        number = re.search(rb"CSeq: (\d+)", asked) or [b"", b"0"]
                        said = said.replace(b"NUMBER", number[1])
                        peer.sendall(said.replace(b"HERE", address.encode()))
                        asked = b""

        def serve():
            with contextlib.suppress(OSError):  # closed
                while True:
                    threading.Thread(target=talk, args=(listening.accept()[0],)).start()

        server = threading.Thread(target=serve)
        server.start()
        yield address
        listening.shutdown(socket.SHUT_RDWR)
        server.join()


H264 = "m=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:t0\r\n"
BAD_RTSP = {
    "silent": ({}, "nothing came for 0.3 s"),
    "another protocol": ({"*": b"SSH-2.0-OpenSSH\r\n\r\n"}, "Invalid data|nothing came"),
    "an endless header": ({"*": b"a: b\r\n" * 20_000}, "Invalid data|nothing came"),
    "a wrong password": (
        {"OPTIONS": rtsp(), "*": rtsp("401 No", WWW_Authenticate='Basic realm="x"')},
        "401 Unauthorized",
    ),
    "no such stream": ({"OPTIONS": rtsp(), "*": rtsp("404 No")}, "404 Not Found"),
    "a loop": ({"OPTIONS": rtsp(), "*": rtsp("302 Moved", Location="HERE")}, "nothing came"),
    "to a file": (
        {"OPTIONS": rtsp(), "*": rtsp("302 Moved", Location="file:///etc/passwd")},
        "Invalid data|nothing came|Connection refused",  # FFmpeg 8.0 takes it for a host
    ),
    "no description": ({"*": rtsp()}, "Invalid data"),
    "sound": (described("m=audio 0 RTP/AVP 0\r\na=control:t0\r\n"), "there is no video in it"),
    "a refused set-up": (described(H264) | {"SETUP": rtsp("461 No")}, "Protocol not supported"),
    "a stream without frames": (described(H264), "nothing came for 0.3 s"),
}


@table("kind", BAD_RTSP)
def test_the_source_gives_up_a_bad_rtsp_host_and_names_the_cause(kind, caplog):
    answers, why = BAD_RTSP[kind]
    with rtsp_host(answers) as url:
        source = Camera(url, timeout=0.3, retry_seconds=0.01, give_up_seconds=0.05)
        with pytest.raises(SourceError, match=rf"source 'camera': no frame for \d+ s: .*({why})"):
            next(source.samples())
    assert "secret" not in caplog.text


def test_a_silent_host_is_given_up_in_time_and_the_error_hides_the_password(caplog):
    with rtsp_host({}) as url:
        host = url.partition("@")[2].partition("/")[0]
        began = time.monotonic()
        with pytest.raises(SourceError) as failed:
            next(Camera(f"{url}?pwd=secret", timeout=30.0, give_up_seconds=1.0).samples())
    assert time.monotonic() - began < 10
    said = rf"no frame for \d s: rtsp://{host}: nothing came for .* \(check that the camera is on"
    assert re.search(said, str(failed.value))
    assert "secret" not in str(failed.value) + caplog.text


@table(
    ("url", "shown"),
    [
        ("rtsp://user:secret@host:554/a?b=c", "rtsp://host:554: "),
        ("rtsp://user:secret@host:554", "rtsp://host:554: "),
        ("http://cam/v.cgi?user=admin&pwd=sec@ret", "http://...: "),
        ("rtsp://user:sec/ret@host:554/a", "rtsp://...: "),
        ("rtsp://user:s@ec/ret@host:554/a", "rtsp://...: "),
        ("http://host/v.cgi?pwd=secret", "http://host: "),
        ("/dev/video7", "/dev/video7: "),
        ("/dev/v4l/by-id/usb-cam-index0", "/dev/v4l/by-id/usb-cam-index0: "),
    ],
)
def test_an_error_shows_no_part_of_a_password(url, shown):
    said = Camera(url).explained("no frame")
    assert said.startswith(f"{shown}no frame (check")
    assert not any(part in said for part in ("sec", "ret", "admin"))
    assert ("are written as %2F, %3F and %23)" in said) == (shown.endswith("...: "))


def test_the_camera_source_accepts_a_url_with_capitals_and_outer_spaces():
    picture = encoded(numbered(1), "JPEG")
    with http_camera(lambda handler, _: answer(handler, picture)) as (_, url):
        assert len(taken(Camera(f" HTTP{url[4:]}\n"), 1)) == 1
        assert len(taken(Camera(url, options={"probesize": 100_000}), 1)) == 1  # a number


def test_a_protocol_that_ffmpeg_does_not_know_ends_the_source():
    with pytest.raises(SourceError, match=r"url rtps://\.\.\.: FFmpeg knows no such protocol"):
        next(Camera("rtps://user:secret@host/path").samples())


def test_the_error_says_that_another_program_uses_the_device():
    said = Camera("/dev/video0").explained(os.strerror(errno.EBUSY))
    assert said.endswith("(another program uses the camera; find and end it: fuser -v /dev/video0)")


def test_a_pause_ends_when_the_source_gives_up(monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.live.FIRST_PAUSE", 60.0)
    began = time.monotonic()
    with pytest.raises(
        SourceError, match=r"no frame .*: /dev/video99: .*\(check that the camera is"
    ):
        next(Camera("/dev/video99", retry_seconds=60.0, give_up_seconds=0.3).samples())
    assert time.monotonic() - began < 20


@table(
    ("settings", "message"),
    [
        ({"url": "frames.mp4"}, "url 'frames.mp4': must be a URL such as"),
        ({"timeout": 0}, "timeout 0: must be above 0"),
        ({"waiting": 0}, "waiting 0"),
        ({"give_up_seconds": 0}, "give_up_seconds 0"),
        ({"fps": -1}, "fps -1"),
    ],
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Camera(**({"url": "rtsp://127.0.0.1/"} | settings))


def test_capture_times_exclude_the_delay_of_the_network():
    clock = CaptureClock()
    delays = [0.5, 0.2, 0.9, 0.2, 1.3, 0.4]
    times = [clock.capture_time(n / 10, 1000 + n / 10 + delay) for n, delay in enumerate(delays)]
    assert times == pytest.approx([1000.5, *(1000.2 + n / 10 for n in range(1, 6))])


def test_segments_of_hls_that_restart_their_packet_counters_lose_no_frame(tmp_path):
    names = [f"{begin}.ts" for begin in range(3)]
    for begin, name in enumerate(names):
        write_video(tmp_path / name, 25, gop=25, begin=begin)
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1"]
    lines += [f"#EXTINF:1.0,\n{name}" for name in names]
    (tmp_path / "live.m3u8").write_text("\n".join([*lines, "#EXT-X-ENDLIST"]))

    def serve(handler, _):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write((tmp_path / handler.path.lstrip("/")).read_bytes())

    with http_camera(serve) as (_, url):
        source = Camera(f"{url}.m3u8", codec="raw", waiting=100)
        sent = [number_of(sample) for sample, _ in itertools.islice(source.samples(), 75)]
        source.stop()
    assert sent == [*range(25)] * 3
    assert source.skipped.by_reason["corrupt"] == 0


def test_capture_times_follow_a_camera_whose_clock_drifts_or_is_set():
    clock = CaptureClock()
    for second in range(10_000):  # the clock loses a thousandth: 10 s in all
        now = 5000.0 + second
        assert abs(clock.capture_time(second * 0.999, now) - now) < 0.2
    assert clock.capture_time(3.0, 20_000.0) == 20_000.0  # the camera's clock begins anew
    assert clock.capture_time(3.04, 20_000.06) == pytest.approx(20_000.04)


@table("hold", [lambda at: (at // 6 + 1) * 6, lambda at: 18 if 13 <= at < 18 else at])
def test_capture_times_keep_their_distance_if_frames_come_in_bursts(hold):
    """Segments of HLS come when they are complete, and a stalled network catches up."""
    clock = CaptureClock()
    times = [clock.capture_time(n / 10, 1000 + hold(n / 10)) for n in range(400)]
    steps = [later - time for time, later in itertools.pairwise(times[60:])]
    assert steps == pytest.approx([0.1] * len(steps))


def test_capture_times_follow_a_clock_that_is_slow_or_stopped_for_a_while():
    clock = CaptureClock()
    for n in range(1000):  # a tenth of the time is missing
        now = 1000 + n / 10
        assert now - 5 < clock.capture_time(n * 0.09, now) <= now
    clock = CaptureClock()
    assert clock.capture_time(0.0, 1000.0) == 1000.0
    assert clock.capture_time(0.1, 4600.0) == 4600.0  # this machine's clock was set
    for n in range(450):
        time = clock.capture_time(0.2 + n / 10, 4610 + n / 10)  # a stop of ten seconds
    assert time == pytest.approx(4610 + n / 10)
