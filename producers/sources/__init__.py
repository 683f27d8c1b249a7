"""Where samples come from. A new source is one file, and one line in the table below."""

from producers.sources.base import Source
from producers.sources.camera import Camera
from producers.sources.cifar import CifarBinary
from producers.sources.crawl import Crawl
from producers.sources.idx import IdxDataset
from producers.sources.image_folder import ImageFolder
from producers.sources.kafka import Kafka
from producers.sources.lerobot import LeRobot
from producers.sources.mcap import McapFiles
from producers.sources.nats import Nats
from producers.sources.npy import NpyVectors
from producers.sources.rosbag import RosBags
from producers.sources.synthetic import Synthetic
from producers.sources.video import VideoFiles
from producers.sources.watched import WatchedFolder
from producers.sources.webdataset import WebDataset

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
    "rosbag": RosBags,
    "synthetic": Synthetic,
    "video": VideoFiles,
    "watch": WatchedFolder,
    "webdataset": WebDataset,
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
    "RosBags",
    "Source",
    "Synthetic",
    "VideoFiles",
    "WatchedFolder",
    "WebDataset",
]
