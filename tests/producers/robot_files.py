"""Robots' logs from the formats' own libraries. Each image shows its number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from mcap_protobuf.writer import Writer as ProtobufWriter
from mcap_ros2.writer import Writer as Ros2Writer
from rosbags.rosbag1 import Writer as Ros1Bag
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Ros2Bag
from rosbags.typesys import Stores, get_typestore
from source_files import encoded
from video_files import numbered

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
ROS1, ROS2 = get_typestore(Stores.ROS1_NOETIC), get_typestore(Stores.ROS2_HUMBLE)
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
TEXT = "std_msgs/msg/String"

Entry = tuple[str, str, int, Any]
"""topic, type, log time, message"""


def header(types: Any, stamp: int) -> Any:
    time = types.types["builtin_interfaces/msg/Time"](stamp // SECOND, stamp % SECOND)
    extra = {"seq": 0} if types is ROS1 else {}
    return types.types["std_msgs/msg/Header"](stamp=time, frame_id="front", **extra)


def image(types: Any, pixel_HWC: np.ndarray, encoding: str, stamp: int, **more: Any) -> Any:
    """Return a sensor_msgs/Image with the array's bytes."""
    height, width = pixel_HWC.shape[:2]
    facts = {"is_bigendian": 0, "step": pixel_HWC.nbytes // height} | more
    data = np.frombuffer(pixel_HWC.tobytes(), np.uint8)
    return types.types[IMAGE](header(types, stamp), height, width, encoding, data=data, **facts)


def compressed(types: Any, data: bytes, kind: str, stamp: int) -> Any:
    return types.types[COMPRESSED](header(types, stamp), kind, np.frombuffer(data, np.uint8))


def drive(types: Any, count: int) -> list[Entry]:
    """Return raw images, compressed images and texts in turn. Two messages share each log time."""
    entries: list[Entry] = []
    for number in range(count):
        log_time = BEGAN + number // 2 * SECOND // 10
        stamp = log_time - 5_000_000
        if number % 3:
            message = image(types, numbered(number), "rgb8", stamp)
            entries.append(("/camera/raw", IMAGE, log_time, message))
        else:
            data = encoded(numbered(number), "JPEG")
            entries.append(
                ("/camera/jpeg", COMPRESSED, log_time, compressed(types, data, "jpeg", stamp))
            )
        entries.append(("/chatter", TEXT, log_time, types.types[TEXT]("hello")))
    return entries


def write_mcap(path: Path, entries: Iterable[Entry], **settings: Any) -> Path:
    with path.open("wb") as file, Ros2Writer(file, chunk_size=20_000, **settings) as writer:
        schemas: dict[str, Any] = {}
        for topic, kind, log_time, message in entries:
            if kind not in schemas:
                text, _ = ROS2.generate_msgdef(kind, ros_version=2)
                schemas[kind] = writer.register_msgdef(kind, text)
            if isinstance(message.data, np.ndarray):
                message = replace(message, data=message.data.tobytes())
            writer.write_message(topic, schemas[kind], message, log_time, log_time)
    return path


def write_bag(path: Path, entries: Iterable[Entry], **compression: Any) -> Path:
    """Write a bag of ROS 1."""
    bag = Ros1Bag(path)
    bag.chunk_threshold = 20_000
    if compression:
        bag.set_compression(**compression)
    with bag:
        connections: dict[str, Any] = {}
        for topic, kind, log_time, message in entries:
            if topic not in connections:
                connections[topic] = bag.add_connection(topic, kind, typestore=ROS1)
            bag.write(connections[topic], log_time, ROS1.serialize_ros1(message, kind))
    return path


def write_bag2(path: Path, entries: Iterable[Entry], mcap: bool = False) -> Path:
    """Write a bag of ROS 2, which is a folder."""
    plugin = StoragePlugin.MCAP if mcap else StoragePlugin.SQLITE3
    with Ros2Bag(path, version=9, storage_plugin=plugin) as bag:
        connections: dict[str, Any] = {}
        for topic, kind, log_time, message in entries:
            if topic not in connections:
                connections[topic] = bag.add_connection(topic, kind, typestore=ROS2)
            bag.write(connections[topic], log_time, ROS2.serialize_cdr(message, kind))
    return path


def foxglove() -> dict[str, type]:
    """Return the types foxglove.CompressedImage and foxglove.RawImage, by their schemas."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="images.proto", package="foxglove", syntax="proto3"
    )
    file.dependency.append("google/protobuf/timestamp.proto")
    shapes: dict[str, list[tuple[str, int, int]]] = {
        "CompressedImage": [("data", 2, field.TYPE_BYTES), ("format", 3, field.TYPE_STRING)],
        "RawImage": [
            ("width", 2, field.TYPE_FIXED32),
            ("height", 3, field.TYPE_FIXED32),
            ("encoding", 4, field.TYPE_STRING),
            ("step", 5, field.TYPE_FIXED32),
            ("data", 6, field.TYPE_BYTES),
        ],
    }
    for name, fields in shapes.items():
        kind = file.message_type.add(name=name)
        kind.field.add(
            name="timestamp",
            number=1,
            type=field.TYPE_MESSAGE,
            label=field.LABEL_OPTIONAL,
            type_name=".google.protobuf.Timestamp",
        )
        kind.field.add(
            name="frame_id", number=7, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL
        )
        for field_name, number, type_ in fields:
            kind.field.add(name=field_name, number=number, type=type_, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"foxglove.{name}"))
        for name in shapes
    }


def write_foxglove(path: Path) -> Path:
    """Write number 3 as WebP and number 5 as raw, stamped 1 and 2 s after the log's begin."""
    types = foxglove()
    webp = types["CompressedImage"](data=encoded(numbered(3), "WEBP"), format="webp")
    pixel_HWC = numbered(5)
    raw = types["RawImage"](
        width=pixel_HWC.shape[1],
        height=pixel_HWC.shape[0],
        encoding="bgr8",
        step=pixel_HWC.shape[1] * 3,
        data=pixel_HWC.tobytes(),
        frame_id="rear",
    )
    with path.open("wb") as file, ProtobufWriter(file) as writer:
        for number, message in enumerate((webp, raw), start=1):
            message.timestamp.FromNanoseconds(BEGAN + number * SECOND)
            writer.write_message(f"/{number}", message, BEGAN + 9 * SECOND, BEGAN)
    return path
