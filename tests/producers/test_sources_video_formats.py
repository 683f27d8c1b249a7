"""Containers and codecs against a plain decode loop; orientation, losses and errors."""

from __future__ import annotations

import io
import re
import struct
import time
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext
from lerobot_files import CAMERAS, V2_VIDEO, write_lerobot
from PIL import Image, ImageOps
from pyarrow import dataset
from robot_files import ROS2, drive, write_mcap
from source_files import encoded, pixels, write_tar
from table import table
from video_files import HEIGHT, RATE, WIDTH, number_of, numbered, write_video

from stream_ssl.producers.sources import (
    Camera,
    ImageFolder,
    LeRobot,
    McapFiles,
    NpyVectors,
    VideoFiles,
    WebDataset,
)
from stream_ssl.producers.sources.base import own_fault
from stream_ssl.producers.sources.film import holds_picture, length_bytes
from stream_ssl.producers.sources.truncation import missing_bytes

OPEN = {"x264-params": "open-gop=1:scenecut=0", "bf": "2"}


def film(path, frames, codec="libx264", fmt="yuv420p", src="rgb24", options=None, limited=False):
    """Write frames (arrays) with options of the encoder."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.options = fmt, {"g": "12", **(options or {})}
        if limited:
            stream.codec_context.color_range = 1
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format=src)
            frame = frame if fmt == src else frame.reformat(format=fmt)
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            if limited:
                frame.color_range = 1
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def decoded(path):
    """Return the number in each frame of a plain decode loop: the naive twin."""
    with av.open(str(path)) as container:
        arrays = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    middle = np.linspace(0, WIDTH, 17).astype(int)[1::2]
    levels = [array[HEIGHT // 2, middle].mean(axis=-1) > 120 for array in arrays]
    return [sum(1 << bit for bit, on in enumerate(level) if on) for level in levels]


@pytest.mark.parametrize(
    ("file", "codec", "options"),
    [
        ("a.mp4", "libx264", OPEN),
        ("a.mkv", "libx264", OPEN),
        ("a.ts", "libx264", OPEN),
        ("a.flv", "libx264", {"bf": "2"}),
        ("a.avi", "libx264", {"bf": "2"}),
        ("a.avi", "mpeg4", {"bf": "2"}),
        ("a.mpg", "mpeg2video", {"bf": "2"}),
        ("a.m2v", "mpeg2video", {"bf": "2"}),
        ("a.mov", "prores_ks", {}),
        ("a.webm", "libvpx-vp9", {"cpu-used": "8"}),
    ],
)
def test_a_film_sends_the_frames_of_a_plain_decode_loop(tmp_path, file, codec, options):
    fmt = "yuv422p10le" if codec == "prores_ks" else "yuv420p"
    path = film(tmp_path / file, [numbered(n) for n in range(40)], codec, fmt, options=options)
    source = VideoFiles(str(path), codec="raw")
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == decoded(path) == list(range(40))
    assert len({sample.id for sample, _ in stream}) == 40
    assert source.skipped.by_reason == {}
    for at in (0, 11, 13, 24, 38):
        rest = list(VideoFiles(str(path), codec="raw").samples(stream[at][1]))
        assert rest == stream[at + 1 :]


def test_a_program_stream_whose_frames_share_packs_resumes_exactly(tmp_path):
    grey = [np.full((HEIGHT, WIDTH, 3), 20 + n * 9 % 220, np.uint8) for n in range(100)]
    path = film(tmp_path / "a.mpg", grey, "mpeg2video", options={"bf": "2"})
    stream = list(VideoFiles(str(path), codec="raw").samples())
    assert len(stream) == 100
    for at in range(4, 100, 12):
        assert list(VideoFiles(str(path), codec="raw").samples(stream[at][1])) == stream[at + 1 :]


def without_times_of_frames(path, out):
    """Copy a film like programs that read a bare stream: frames have the times of packets."""
    with av.open(str(path)) as film, av.open(str(out), "w") as copy:
        stream = copy.add_stream_from_template(film.streams.video[0])
        first = None
        for packet in film.demux(video=0):
            if packet.dts is not None:
                first = packet.dts if first is None else first
                packet.pts = packet.dts = packet.dts - first
                packet.stream = stream
                copy.mux(packet)
    return out


@pytest.mark.parametrize("file", ["a.mp4", "a.mkv", "a.ts"])
def test_frames_without_times_are_sent_in_display_order(tmp_path, file):
    whole = film(tmp_path / "whole.mp4", [numbered(n) for n in range(40)], options=OPEN)
    path = without_times_of_frames(whole, tmp_path / file)
    source = VideoFiles(str(path), codec="raw")
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == decoded(path) == list(range(40))
    seconds = [sample.meta["seconds"] for sample, _ in stream]
    np.testing.assert_allclose(np.diff(seconds), 1 / RATE, atol=1e-3)
    assert source.skipped.by_reason == {}
    for at in (0, 11, 13, 24, 38):
        rest = list(VideoFiles(str(path), codec="raw").samples(stream[at][1]))
        assert rest == stream[at + 1 :]
    keys = VideoFiles(str(path), codec="raw", key_frames=True)
    assert [number_of(sample) for sample, _ in keys.samples()] == [0, 12, 24, 36]


def test_a_resumed_film_with_a_palette_keeps_its_colours(tmp_path):
    path, colours = tmp_path / "a.avi", np.full((256, 4), 255, np.uint8)
    colours[:, 1:] = np.arange(256)[::-1, None]  # alpha, then levels: 255 is black
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "pal8"
        for n in range(20):
            pixels_HW = 255 - numbered(n)[..., 0]
            container.mux(stream.encode(av.VideoFrame.from_ndarray((pixels_HW, colours), "pal8")))
        container.mux(stream.encode())
    stream = list(VideoFiles(str(path), codec="raw").samples())
    assert [number_of(sample) for sample, _ in stream] == list(range(20))
    for at in (0, 9, 18):
        rest = list(VideoFiles(str(path), codec="raw").samples(stream[at][1]))
        assert rest == stream[at + 1 :]


def test_joined_films_resume_and_their_frames_out_of_order_are_counted(tmp_path):
    later = write_video(tmp_path / "later.ts", 20, begin=3)
    joined = tmp_path / "joined.ts"
    joined.write_bytes(later.read_bytes() + write_video(tmp_path / "first.ts", 20).read_bytes())
    source = VideoFiles(str(joined), codec="raw")
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == list(range(20))
    assert source.skipped.by_reason == {"out of order": 20}
    for at in range(20):
        rest = list(VideoFiles(str(joined), codec="raw").samples(stream[at][1]))
        assert rest == stream[at + 1 :]


def without_recovery_points(path, out):
    """Copy an H.264 film, and leave out the messages that mark key frames of open GOPs."""
    with av.open(str(path)) as film, av.open(str(out), "w") as copy:
        stream = copy.add_stream_from_template(film.streams.video[0])
        units = BitStreamFilterContext("filter_units=remove_types=6", film.streams.video[0])
        for packet in film.demux(video=0):
            for kept in units.filter(packet if packet.dts is not None else None):
                kept.stream = stream
                copy.mux(kept)
    return out


@table(
    ("file", "codec", "options"),
    [("a.mp4", "libx264", OPEN), ("a.webm", "libvpx-vp9", {"cpu-used": "8"})],
)
def test_key_frames_include_every_frame_that_is_stored_whole(tmp_path, file, codec, options):
    path = film(tmp_path / file, [numbered(n) for n in range(40)], codec, options=options)
    if codec == "libx264":
        path = without_recovery_points(path, tmp_path / "open.mp4")
    with av.open(str(path)) as container:
        whole = [
            number
            for number, frame in enumerate(container.decode(video=0))
            if frame.key_frame or int(frame.pict_type) == 1
        ]
    assert whole == [0, 12, 24, 36]
    source = VideoFiles(str(path), key_frames=True, codec="raw")
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == whole
    assert list(source.samples(stream[1][1])) == stream[2:]


def quarters():
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[:24, :32], image[:24, 32:] = (220, 30, 30), (30, 200, 40)
    image[24:, :32], image[24:, 32:] = (40, 50, 210), (240, 230, 40)
    return image


MATRICES = {
    1: (1, 0, 0, 1, 0, 0),
    2: (-1, 0, 0, 1, WIDTH, 0),
    3: (-1, 0, 0, -1, WIDTH, HEIGHT),
    4: (1, 0, 0, -1, 0, HEIGHT),
    5: (0, 1, 1, 0, 0, 0),
    6: (0, 1, -1, 0, HEIGHT, 0),
    7: (0, -1, -1, 0, HEIGHT, WIDTH),
    8: (0, -1, 1, 0, 0, WIDTH),
}
"""QuickTime's display matrix, a, b, c, d, x, y, by the value of EXIF's orientation."""


def turned(data, orientation):
    """Return an MP4 file with another display matrix."""
    a, b, c, d, x, y = MATRICES[orientation]
    at = data.index(b"tkhd") + 44
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, x << 16, y << 16, 1 << 30)
    return data[:at] + matrix + data[at + 36 :]


def shown(sample):
    if sample.codec == "raw":
        return np.frombuffer(sample.data, np.uint8).reshape(sample.shape).astype(int)
    return np.asarray(Image.open(io.BytesIO(sample.data))).astype(int)


def picture(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    file = io.BytesIO()
    Image.fromarray(quarters()).save(file, "JPEG", quality=98, subsampling=0, exif=exif)
    return file.getvalue()


@table("orientation", MATRICES)
@pytest.mark.parametrize("codec", ["raw", "jpeg"])
def test_frames_are_upright_in_each_of_the_eight_orientations(tmp_path, codec, orientation):
    plain = film(tmp_path / "plain.mp4", [quarters()] * 2, options={"crf": "1"}).read_bytes()
    right = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(picture(orientation)))))
    for name, data in (("a.mp4", turned(plain, orientation)), ("a.mjpeg", picture(orientation))):
        (tmp_path / name).write_bytes(data)
        sample, _ = next(VideoFiles(str(tmp_path / name), codec=codec).samples())
        image = shown(sample)
        assert image.shape == right.shape
        assert np.abs(image - right).mean() < 12


def test_frames_of_a_lerobot_film_follow_its_display_matrix(tmp_path):
    root = write_lerobot(tmp_path / "set", "v2.1")
    path = root / V2_VIDEO.format(episode_chunk=0, episode_index=0, video_key=CAMERAS[0])
    film(path, [quarters()] * 6)
    upright = [shown(s) for s, _ in LeRobot(root, "0:1", CAMERAS[:1], codec="raw").samples()]
    path.write_bytes(turned(path.read_bytes(), 7))
    mirrored = [shown(s) for s, _ in LeRobot(root, "0:1", CAMERAS[:1], codec="raw").samples()]
    assert len(mirrored) == len(upright) == 6
    for before, after in zip(upright, mirrored, strict=True):
        assert (after == np.rot90(before, 2).transpose(1, 0, 2)).all()


@table(("codec", "fmt", "file"), [("ffv1", "gray", "a.mkv"), ("ffv1", "gray10le", "a.mkv")])
def test_grey_of_limited_range_is_sent_in_full_range(tmp_path, codec, fmt, file):
    scale, kind = (4, np.uint16) if fmt == "gray10le" else (1, np.uint8)
    levels = [np.full((HEIGHT, WIDTH), level * scale, kind) for level in (8, 16, 126, 235, 250)]
    for limited, right in ((True, [0, 0, 128, 255, 255]), (False, [8, 16, 126, 235, 250])):
        path = film(tmp_path / file, levels, codec, fmt, fmt, limited=limited)
        sent = [shown(s).mean() for s, _ in VideoFiles(str(path), codec="raw").samples()]
        assert sent == pytest.approx(right, abs=1.5)


def box(kind, *parts):
    body = b"".join(parts)
    return (8 + len(body)).to_bytes(4, "big") + kind + body


def covered(path):
    """Put a cover picture before the film in an MP4 file, as taggers do."""
    data = path.read_bytes()
    own = data.rfind(b"udta")
    data = data[:own] + b"free" + data[own + 4 :]
    image = encoded(np.full((64, 64, 3), 250, np.uint8), "JPEG")
    item = box(b"covr", box(b"data", (13).to_bytes(4, "big") + bytes(4), image))
    kind = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    user = box(b"udta", box(b"meta", bytes(4), kind, box(b"ilst", item)))
    at = data.find(b"moov") - 4
    size = int.from_bytes(data[at : at + 4], "big") + len(user)
    path.write_bytes(data[:at] + size.to_bytes(4, "big") + b"moov" + user + data[at + 8 :])


def test_a_cover_picture_is_not_sent_as_a_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", 12)
    covered(path)
    with av.open(str(path)) as container:
        assert len(container.streams.video) == 2
    source = VideoFiles(str(path), codec="raw")
    assert [number_of(sample) for sample, _ in source.samples()] == list(range(12))
    assert source.skipped.by_reason == {}


def test_a_file_of_an_unknown_codec_costs_no_other_file(tmp_path, caplog):
    for name in "ab":
        write_video(tmp_path / f"{name}.mp4", 5)
    path = tmp_path / "a.mp4"
    path.write_bytes(path.read_bytes().replace(b"avc1", b"????"))
    source = VideoFiles(str(tmp_path / "*.mp4"))
    assert [sample.meta["file"] for sample, _ in source.samples()] == ["b.mp4"] * 5
    assert "there is no video in it but a cover picture, or one of an unknown codec" in caplog.text


def test_other_video_streams_of_a_file_are_counted(tmp_path, caplog):
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        streams = [container.add_stream("libx264", rate=RATE) for _ in range(2)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(3):
            for stream in streams:
                frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24")
                container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode())
    source = VideoFiles(str(tmp_path / "a.mkv"))
    assert len(list(source.samples())) == 3
    assert source.skipped.by_reason == {"other stream": 1}
    assert "stream 0 is sent" in caplog.text


@table(
    ("file", "codec", "container"),
    [
        ("a.mp4", "libx264", {"movflags": "faststart"}),
        ("a.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
        ("a.mkv", "libx264", {}),
        ("a.mkv", "libx264", {"live": "1"}),
        ("a.avi", "mpeg4", {}),
    ],
)
def test_a_file_that_was_cut_off_is_counted_as_damaged(tmp_path, caplog, file, codec, container):
    path = write_video(tmp_path / file, 40, codec, container_options=container)
    whole = VideoFiles(str(path))
    assert len(list(whole.samples())) == 40
    assert (whole.skipped.by_reason, missing_bytes(path)) == ({}, 0)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.8)])
    source = VideoFiles(str(path))
    assert 0 < len(list(source.samples())) < 40
    assert source.skipped.by_reason["damaged"] == 1
    assert "bytes are missing or blank: copy the file again" in caplog.text


@table("extra", [bytes(5000), b"maker's notes"])
@table("file", ["a.mp4", "a.avi"])
def test_other_bytes_behind_a_film_are_not_counted_as_damage(tmp_path, file, extra):
    path = write_video(tmp_path / file, 10, "mpeg4")
    path.write_bytes(path.read_bytes() + extra)
    source = VideoFiles(str(path))
    assert len(list(source.samples())) == 10
    assert (source.skipped.by_reason, missing_bytes(path)) == ({}, 0)


def test_blank_bytes_in_a_matroska_file_are_counted_as_damage(tmp_path):
    path = write_video(tmp_path / "a.mkv", 60, gop=5)
    data = path.read_bytes()
    path.write_bytes(data[:2000] + bytes(800) + data[2800:])
    source = VideoFiles(str(path))
    assert len(list(source.samples())) < 60
    assert source.skipped.by_reason["damaged"] == 1


def test_frames_before_the_first_key_frame_are_counted(tmp_path):
    path = write_video(tmp_path / "a.ts", 40, gop=20)
    data = path.read_bytes()
    with av.open(str(path)) as container:
        second = [packet.pos for packet in container.demux(video=0)][4]
    path.write_bytes(data[second:])
    source = VideoFiles(str(path), codec="raw")
    sent = [number_of(sample) for sample, _ in source.samples()]
    assert sent == list(range(40 - len(sent), 40))
    assert source.skipped.by_reason == {"without a frame": 36 - len(sent)}


@table("codec", ["libx264", "libx265", "mpeg2video", "mpeg4"])
def test_frames_that_refer_to_lost_data_are_not_sent(tmp_path, codec):
    path = film(tmp_path / "a.ts", moving(), codec, options={"b": "4M"})
    whole = by_time(VideoFiles(str(path), codec="raw"))
    data = path.read_bytes()
    with av.open(str(path)) as container:
        begin = [packet.pos for packet in container.demux(video=0) if packet.size][15]
    path.write_bytes(data[: begin + 188] + data[begin + 376 :])  # one packet of the transport
    source = VideoFiles(str(path), codec="raw")
    sent = by_time(source)
    assert 36 <= len(sent) < 48
    assert sent == {time: whole[time] for time in sent}
    assert max(sent) == max(whole)
    assert source.skipped.by_reason == {"corrupt": 48 - len(sent)}


@table("place", [9, 15, 20, 33])
def test_frames_that_refer_to_a_broken_packet_are_not_sent(tmp_path, place):
    path = film(tmp_path / "a.mp4", moving(), "libx264", options={"b": "4M"})
    whole = by_time(VideoFiles(str(path), codec="raw"))
    with av.open(str(path)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][place]
        begin, size = packet.pos, packet.size
    data = bytearray(path.read_bytes())
    data[begin : begin + size] = size.to_bytes(4) + b"\xff" * (size - 4)
    path.write_bytes(data)
    source = VideoFiles(str(path), codec="raw")
    sent = by_time(source)
    assert 8 <= len(sent) < 48  # with many threads, the decoder holds many frames back
    assert sent == {time: whole[time] for time in sent}


def test_pictures_of_h264_are_found_in_units_with_marks_and_with_lengths():
    picture, note = b"\x65" + b"x" * 271, b"\6" + b"x" * 271  # lengths that look like marks
    assert holds_picture(len(picture).to_bytes(4) + picture, 4)
    assert not holds_picture(len(note).to_bytes(4) + note, 4)
    assert holds_picture(len(note).to_bytes(2) + note + len(picture).to_bytes(2) + picture, 2)
    assert holds_picture(b"\0\0\0\1" + note + b"\0\0\1" + picture, 0)
    assert not holds_picture(b"\0\0\1" + note, 0)
    assert [length_bytes(b"\1d\0\x28\xff\xe1"), length_bytes(b"\1d\0\x28\xfd")] == [4, 2]
    assert [length_bytes(b"\0\0\0\1\x67"), length_bytes(b"")] == [0, 0]


@table("note", [b"\x06\5\4abcd\x80", b"\x0c\xff\xff\x80", b"\x1fmaker"])
def test_a_packet_with_only_a_note_costs_no_frame(tmp_path, note):
    made = film(tmp_path / "made.mp4", moving())
    with av.open(str(made)) as before, av.open(str(tmp_path / "a.mp4"), "w") as after:
        stream = after.add_stream_from_template(before.streams.video[0])
        for number, packet in enumerate(before.demux(video=0)):
            if number == 14:
                alone = av.Packet(len(note).to_bytes(4) + note)
                alone.pts, alone.dts = packet.dts - 1, packet.dts - 1
                alone.time_base, alone.stream = packet.time_base, stream
                after.mux(alone)
            if packet.size:
                packet.stream = stream
                after.mux(packet)
    source = VideoFiles(str(tmp_path / "a.mp4"), codec="raw")
    assert len(by_time(source)) == 48
    assert source.skipped.by_reason == {"undecodable": 1}


def moving():
    """Return pictures whose film stores little more than motion."""
    noise = np.random.default_rng(0)
    scene = noise.integers(20, 220, (12, 16, 3), np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    return [
        np.roll(scene, 5 * n, axis=1) + noise.integers(0, 30, scene.shape, np.uint8)
        for n in range(48)
    ]


def by_time(source):
    return {sample.id.rpartition("#")[2]: bytes(sample.data) for sample, _ in source.samples()}


@table(
    ("data", "says"),
    [
        (b"", "the file is empty: copy it again"),
        (b"no video " * 500, "not a video that FFmpeg can read: Invalid data .* b'no video no '"),
        (b"#EXTM3U\n#EXTINF:1,\nx.ts\n", "a playlist. Name the files themselves"),
        (None, r"an MP4 file without its index \(moov\).* was cut off: copy the file again"),
    ],
)
def test_the_log_names_the_remedy_for_a_file_that_is_no_video(tmp_path, caplog, data, says):
    path = write_video(tmp_path / "a.mp4", 5)
    path.write_bytes(path.read_bytes()[:1500] if data is None else data)
    with pytest.raises(ValueError, match="not one sample"):
        list(VideoFiles(str(path)).samples())
    assert caplog.messages
    assert re.search(says, caplog.text)


def test_a_wrong_call_of_a_library_is_not_counted_as_damage(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", 2)
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    root = write_lerobot(tmp_path / "set", "v2.1", films=False)
    lenient = "stream_ssl.producers.sources.video.lenient"
    monkeypatch.setattr(lenient, lambda: {"metadata_error": "x"})
    monkeypatch.setattr(np.lib.format, "open_memmap", lambda file: None)
    table = SimpleNamespace(schema=SimpleNamespace(names=["frame_index"]), scanner=lambda: None)
    monkeypatch.setattr(dataset, "dataset", lambda file: table)
    for read in (
        lambda: list(VideoFiles(str(tmp_path / "a.mp4")).samples()),
        lambda: list(LeRobot(root).samples()),
        lambda: NpyVectors(tmp_path / "a.npy"),
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            read()


def test_a_missing_module_is_an_own_fault_and_an_error_within_a_library_is_not():
    with pytest.raises(AttributeError) as within:
        Image.fromarray(None)
    assert not own_fault(within.value)
    assert own_fault(ImportError("no module"))
    assert not own_fault(ValueError("bad"))


@table("kind", ["video", "webdataset", "npy", "images", "mcap"])
def test_samples_of_files_with_equal_names_have_different_ids(tmp_path, kind):
    sources = []
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        image = pixels(1, 8, 8, 3, seed=number)[0]
        if kind == "video":
            film(folder / "cam.mp4", [numbered(3 * number + n) for n in range(3)])
            source = VideoFiles(str(folder / "cam.mp4"), codec="raw")
        elif kind == "webdataset":
            write_tar(folder / "0.tar", [("x.png", encoded(image))])
            source = WebDataset(str(folder / "0.tar"))
        elif kind == "npy":
            np.save(folder / "0.npy", np.full((2, 3), number, np.float32))
            source = NpyVectors(folder / "0.npy")
        elif kind == "images":
            (folder / "0.png").write_bytes(encoded(image))
            source = ImageFolder(folder, name="images")
        else:
            write_mcap(folder / "0.mcap", drive(ROS2, 2 + number))
            source = McapFiles(str(folder / "0.mcap"))
        sources.append({sample.id for sample, _ in source.samples()})
    assert sources[0]
    assert not sources[0] & sources[1]


@table("dated", ["9999-01-01T00:00:00Z", False])
def test_an_impossible_time_gives_way_to_the_time_of_the_file(tmp_path, monkeypatch, dated):
    """An error would end the source, and all files after this one with it."""
    path = write_video(tmp_path / f"{bool(dated)}.nut", 3, codec="mpeg4", dated=dated)
    if not dated:
        monkeypatch.setattr("stream_ssl.producers.sources.video.time_of_zero", lambda _: -1e14)
    now = time.time()
    times = [sample.time for sample, _ in VideoFiles(str(path)).samples()]
    assert len(times) == 3
    assert all(now - 60 < one < now + 60 for one in times)


def test_a_frame_that_exceeds_an_encoders_limits_costs_no_other_file(tmp_path, caplog):
    wide = tmp_path / "a.avi"
    film(wide, [np.zeros((16, 16_400, 3), np.uint8)], "mjpeg", "yuvj420p")
    files = [str(wide), str(write_video(tmp_path / "b.mp4", 2))]
    source = VideoFiles(files, codec="webp")
    assert [sample.meta["file"] for sample, _ in source.samples()] == ["b.mp4"] * 2
    assert source.skipped.by_reason == {"damaged": 1}
    assert "exceeds WebP limit of 16383 pixels" in caplog.text
    camera = Camera("rtsp://host/", codec="webp")
    with av.open(str(wide)) as container:
        frame = next(container.decode(video=0))
    assert camera.sample((frame, "1", 5.0)) is None
    assert camera.skipped.by_reason == {"not encoded": 1}
