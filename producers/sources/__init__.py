"""The sources of a producer. The table `SOURCES` names all that a command can use."""

from stream_ssl.producers.sources.base import Source
from stream_ssl.producers.sources.camera import Camera
from stream_ssl.producers.sources.cifar import CifarBinary
from stream_ssl.producers.sources.crawl import Crawl
from stream_ssl.producers.sources.idx import IdxDataset
from stream_ssl.producers.sources.image_folder import ImageFolder
from stream_ssl.producers.sources.kafka import Kafka
from stream_ssl.producers.sources.lerobot import LeRobot
from stream_ssl.producers.sources.mcap import McapFiles
from stream_ssl.producers.sources.nats import Nats
from stream_ssl.producers.sources.npy import NpyVectors
from stream_ssl.producers.sources.parquet import ParquetFiles
from stream_ssl.producers.sources.ros import Ros
from stream_ssl.producers.sources.rosbag import RosBags
from stream_ssl.producers.sources.synthetic import Synthetic
from stream_ssl.producers.sources.video import VideoFiles
from stream_ssl.producers.sources.watched import WatchedFolder
from stream_ssl.producers.sources.webdataset import WebDataset
from stream_ssl.producers.sources.zenoh_ros import ZenohRos

SOURCES: dict[str, type[Source]] = {
    "camera": Camera,
    "cifar": CifarBinary,
    "crawl": Crawl,
    "idx": IdxDataset,
    "images": ImageFolder,
    "kafka": Kafka,
    "lerobot": LeRobot,
    "mcap": McapFiles,
    "nats": Nats,
    "npy": NpyVectors,
    "parquet": ParquetFiles,
    "ros": Ros,
    "rosbag": RosBags,
    "synthetic": Synthetic,
    "video": VideoFiles,
    "watch": WatchedFolder,
    "webdataset": WebDataset,
    "zenoh": ZenohRos,
}

__all__ = [
    "SOURCES",
    "Camera",
    "CifarBinary",
    "Crawl",
    "IdxDataset",
    "ImageFolder",
    "Kafka",
    "LeRobot",
    "McapFiles",
    "Nats",
    "NpyVectors",
    "ParquetFiles",
    "Ros",
    "RosBags",
    "Source",
    "Synthetic",
    "VideoFiles",
    "WatchedFolder",
    "WebDataset",
    "ZenohRos",
]
