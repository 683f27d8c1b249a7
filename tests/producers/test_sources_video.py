"""Video files: each chosen frame is sent exactly once, and damage is counted."""

import gc
import logging
import os
from pathlib import Path

import av
import numpy as np
import pytest
from table import table
from video_files import HEIGHT, RATE, WIDTH, number_of, numbered, write_video

from stream_ssl.producers.sources import VideoFiles
from stream_ssl.producers.sources.fields import file_name
from stream_ssl.producers.sources.frames import FrameEncoder

BEGAN = 1_714_979_289.0  # 2024-05-06T07:08:09Z


def numbers(source, position=None):
    return [number_of(sample) for sample, _ in source.samples(position)]


@table(
    ("file", "codec"),
    [
        ("a.mp4", "libx264"),
        ("a.mkv", "libx264"),
        ("a.ts", "libx264"),
        ("a.avi", "mpeg4"),
        ("a.h264", "libx264"),  # a stream without times
        ("a.webm", "libvpx"),
        ("a.mjpeg", "mjpeg"),
    ],
)
def test_a_film_sends_every_frame_once_and_resumes_after_each(tmp_path, file, codec):
    path = write_video(tmp_path / file, 30, codec)
    source = VideoFiles(str(path), codec="raw")
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == list(range(30))
    assert source.skipped.by_reason == {}
    assert {sample.shape for sample, _ in stream} == {(HEIGHT, WIDTH, 3)}
    for at in (0, 9, 10, 17, 28, 29):
        rest = list(VideoFiles(str(path), codec="raw").samples(stream[at][1]))
        assert [number_of(sample) for sample, _ in rest] == list(range(at + 1, 30))
        assert rest == stream[at + 1 :]


def test_the_video_source_turns_off_the_log_of_ffmpeg(tmp_path):
    path = write_video(tmp_path / "a.mp4", 5)
    av.logging.set_level(av.logging.ERROR)  # as torchvision before 0.26 does
    assert numbers(VideoFiles(str(path), codec="raw")) == list(range(5))
    assert av.logging.get_level() is None


def test_times_follow_the_date_of_the_file_and_the_times_of_the_stream(tmp_path):
    path = write_video(tmp_path / "drive.mp4", 5)
    samples = [sample for sample, _ in VideoFiles(str(path)).samples()]
    assert [sample.time - BEGAN for sample in samples] == pytest.approx(
        [n / RATE for n in range(5)]
    )
    assert samples[3].meta == {"file": "drive.mp4", "seconds": 0.12}
    assert len({sample.id for sample in samples}) == 5
    assert samples[0].id == f"{file_name(path)}#0"


@table(
    ("file", "dated"),
    [("a.mp4", True), ("a.mp4", False), ("a.mkv", True), ("a.mkv", False), ("a.ts", False)],
)
def test_frames_of_a_later_part_of_a_recording_get_their_own_times(tmp_path, file, dated):
    """The times in the stream begin at two hours."""
    path = write_video(tmp_path / file, 50, begin=7200, dated=dated)
    os.utime(path, (BEGAN + 2, BEGAN + 2))  # the end of the recording
    samples = [sample for sample, _ in VideoFiles(str(path)).samples()]
    assert samples[0].meta["seconds"] >= 7200
    assert [sample.time - BEGAN for sample in samples] == pytest.approx(
        [n / RATE for n in range(50)], abs=0.1
    )


def test_a_film_whose_name_is_not_unicode_is_read(tmp_path):
    film = write_video(tmp_path / "a.mp4", 3).rename(tmp_path / os.fsdecode(b"caf\xe9.mp4"))
    assert {sample.meta["file"] for sample, _ in VideoFiles(str(film)).samples()} == {
        r"caf\xe9.mp4"
    }


@table(("fps", "step"), [(25, 1), (12.5, 2), (5, 5), (1, 25), (1000, 1)])
def test_fps_selects_frames_at_even_distances(tmp_path, fps, step):
    path = write_video(tmp_path / "a.mp4", 60)
    assert numbers(VideoFiles(str(path), fps=fps)) == list(range(0, 60, step))


def test_the_option_key_frames_selects_only_key_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", 35, gop=10, options={"x264-params": "scenecut=0"})
    with av.open(str(path)) as container:
        keys = [f.pts for f in container.decode(video=0) if f.key_frame]
    source = VideoFiles(str(path), key_frames=True)
    stream = list(source.samples())
    assert [sample.id for sample, _ in stream] == [f"{file_name(path)}#{pts}" for pts in keys]
    assert 2 <= len(stream) < 35
    assert list(source.samples(stream[0][1])) == stream[1:]


def test_a_still_scene_is_sent_once(tmp_path):
    path = tmp_path / "a.mp4"
    scenes = [1] * 12 + [2] * 5 + [1] * 8 + [3]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number, scene in enumerate(scenes):
            noise_HWC = np.random.default_rng(number).integers(0, 5, (HEIGHT, WIDTH, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(numbered(scene) + noise_HWC, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    source = VideoFiles(str(path), scene_change=0.05)
    sent = list(source.samples())
    assert [number_of(sample) for sample, _ in sent] == [1, 2, 1, 3]
    assert list(source.samples(sent[1][1])) == sent[2:]
    assert len(numbers(VideoFiles(str(path)))) == len(scenes)


@table(("codec", "quality"), [("raw", 90), ("jpeg", 30), ("webp", 30)])
def test_frames_have_the_requested_codec_and_size(tmp_path, codec, quality):
    path = write_video(tmp_path / "a.mp4", 4)
    source = VideoFiles(str(path), codec=codec, quality=quality, size=24)
    samples = [sample for sample, _ in source.samples()]
    assert [sample.codec for sample in samples] == [codec] * 4
    assert [number_of(sample) for sample in samples] == [0, 1, 2, 3]
    assert samples[0].shape == ((24, 32, 3) if codec == "raw" else None)


def test_frames_that_were_sent_are_freed_at_once(tmp_path):
    """Python's garbage collector alone would let hundreds of frames pile up."""
    film = write_video(tmp_path / "film.mp4", 100)
    gc.collect()
    gc.disable()
    try:
        sent = sum(1 for _ in VideoFiles(str(film), codec="raw").samples())
        large = [f for f in gc.get_objects() if isinstance(f, av.VideoFrame) and f.width == WIDTH]
    finally:
        gc.enable()
    assert sent == 100
    assert len(large) <= 2


def files_of_a_hostile_world(folder):
    """Return by reason the bytes of a file, and the most frames that it still gives."""
    whole = write_video(folder / "whole.mkv", 60, gop=5).read_bytes()
    secret = folder / "secret.mp4"
    write_video(secret, 3)
    return {
        "empty": (b"", 0),
        "text": (b"no video " * 500, 0),
        "a picture's head": (b"\xff\xd8\xff\xe0" + b"x" * 500, 0),
        "half of MP4": (write_video(folder / "half.mp4", 60).read_bytes()[:2000], 0),
        "a cut tail": (whole[: len(whole) * 2 // 3], 59),
        "a title in Latin-1": (titled(folder / "titled.mkv", 60), 60),
        "a hole": (whole[:4000] + bytes(1500) + whole[5500:], 60),
        "a playlist": (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n", 0),
        "a list": (f"ffconcat version 1.0\nfile 'http://127.0.0.1:9/{secret.name}'\n".encode(), 0),
    }


def titled(path, frames):
    """Return a film whose title is not UTF-8. Many cameras write such titles."""
    with av.open(str(write_video(path, frames))) as film, av.open(str(path) + ".mkv", "w") as out:
        stream = out.add_stream_from_template(film.streams.video[0])
        out.metadata["title"] = "caf~"
        for packet in film.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return Path(str(path) + ".mkv").read_bytes().replace(b"caf~", b"caf\xe9")


KINDS = ("empty", "text", "a picture's head", "half of MP4", "a cut tail", "a hole")


@table("kind", [*KINDS, "a title in Latin-1", "a playlist", "a list"])
def test_a_damaged_film_costs_no_other_film(tmp_path, caplog, kind):
    data, most = files_of_a_hostile_world(tmp_path)[kind]
    bad, good = tmp_path / "bad.bin", write_video(tmp_path / "good.mp4", 5)
    bad.write_bytes(data)
    source = VideoFiles([str(bad), str(good)], codec="raw")
    with caplog.at_level(logging.INFO):
        stream = list(source.samples())
    sent = [number_of(sample) for sample, _ in stream if sample.meta["file"] == "bad.bin"]
    assert sent == sorted(set(sent))
    assert len(sent) <= most
    assert len(sent) >= most // 2
    assert [number_of(sample) for sample, _ in stream[len(sent) :]] == [0, 1, 2, 3, 4]
    # The reader of Matroska skips a gap without an error.
    if kind not in ("a cut tail", "a hole", "a title in Latin-1"):
        assert source.skipped.by_reason.total() >= 1
        assert "left out" in caplog.text
        assert "bad.bin" in caplog.text
    assert "has been read to its end; left out" in caplog.text


def test_a_file_with_only_sound_is_refused(tmp_path, caplog):
    path = tmp_path / "a.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(ValueError, match="not one sample of a whole pass"):
        list(VideoFiles(str(path)).samples())
    assert "there is no video in it" in caplog.text


def test_stop_ends_a_film_whose_further_frames_are_all_left_out(tmp_path):
    path = write_video(tmp_path / "a.mp4", 30)
    source = VideoFiles(str(path), scene_change=0.99, epochs=None)
    stream = source.samples()
    next(stream)
    source.stop()
    assert list(stream) == []


@table(
    ("settings", "message"),
    [
        ({"fps": 0}, "fps 0: must be above 0"),
        ({"scene_change": 1}, r"scene_change 1: must lie in \[0, 1\)"),
        ({"size": 0}, "size 0"),
        ({"quality": 0}, "quality 0"),
        ({"epochs": 0}, "epochs 0"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        VideoFiles(str(write_video(tmp_path / "a.mp4", 2)), **settings)


def test_a_position_beyond_the_times_of_ffmpeg_gives_no_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", 10)
    _, position = next(VideoFiles(str(path)).samples())
    assert numbers(VideoFiles(str(path)), position | {"at": [0, 2**64 - 1, 0]}) == []


def test_a_position_of_another_choice_or_another_file_is_refused(tmp_path):
    path = write_video(tmp_path / "a.mp4", 10)
    (*_, (_, position)) = VideoFiles(str(path), fps=5).samples()
    with pytest.raises(ValueError, match="fps was 5 and is 4"):
        VideoFiles(str(path), fps=4).samples(position)
    write_video(path, 11)
    with pytest.raises(ValueError, match="bytes was"):
        VideoFiles(str(path), fps=5).samples(position)


def test_a_picture_with_transparency_becomes_jpeg():
    payload = FrameEncoder("jpeg", 90)(np.zeros((4, 4, 4), np.uint8))
    assert payload["data"].startswith(b"\xff\xd8\xff")
