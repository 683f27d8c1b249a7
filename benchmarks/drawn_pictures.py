"""How well does the near-duplicate test decide about pictures that are no photographs?

python -m benchmarks.drawn_pictures --pairs FILE.png

The pictures are drawn here: pages of Python's own source code, characters, plots, chess boards,
spectrograms and flags. All are different, though some look alike, such as a letter with two
accents. The command prints how many of them are dropped, and how many changed copies of a hundred
are found. FILE shows dropped pictures, each beside the picture that it repeats.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from benchmarks.duplicates import KINDS, tensor
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.near_duplicates import NearDuplicates

FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"
SIDE, BATCH, SHOWN = 96, 128, 6

Pair = tuple[int, int]


def pages(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield pages of 45 lines of code, at most five of each file."""
    font = ImageFont.truetype(FONTS / "DejaVuSansMono.ttf", 14)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in generator.permutation(np.array(files, dtype=object)):
        lines = file.read_text(errors="replace").splitlines()
        for start in range(0, min(len(lines) - 45, 225), 45):
            page = Image.new("RGB", (800, 1000), "white")
            text = "\n".join(line[:85] for line in lines[start : start + 45])
            ImageDraw.Draw(page).multiline_text((60, 60), text, font=font, fill="black")
            yield page


def characters(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield characters of DejaVu Sans. Those that are drawn equally come once."""
    file = FONTS / "DejaVuSans.ttf"
    font, drawn = ImageFont.truetype(file, 80), set[bytes]()
    for code in generator.permutation(sorted(FT2Font(str(file)).get_charmap())):
        image = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(image).text((20, 10), chr(code), font=font, fill="black")
        if image.getbbox() and np.asarray(image).min() < 128 and image.tobytes() not in drawn:
            drawn.add(image.tobytes())
            yield image


def plots(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield lines, bars, points, pictures and histograms of random numbers, in turn."""
    for number in range(500):
        figure = Figure(figsize=(4, 3), dpi=60)
        FigureCanvasAgg(figure)
        axes, noise = figure.subplots(), generator.normal(size=(20, 20)).cumsum(axis=0)
        match number % 5:
            case 0:
                axes.plot(noise.ravel()[:60])
            case 1:
                axes.bar(range(12), generator.random(12))
            case 2:
                axes.scatter(*noise[:2])
            case 3:
                axes.imshow(noise, aspect="auto")
            case 4:
                axes.hist(noise.ravel(), bins=20)
        axes.set_title(f"run {number}")
        figure.savefig(data := io.BytesIO(), format="png")
        yield Image.open(data).convert("RGB")


def boards(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield chess boards with 6 to 32 pieces anywhere."""
    font = ImageFont.truetype(FONTS / "DejaVuSans.ttf", 44)
    for _ in range(1000):
        board = Image.new("RGB", (400, 400), (240, 217, 181))
        pen = ImageDraw.Draw(board)
        for field in range(64):
            left, top = field % 8 * 50, field // 8 * 50
            if (field + field // 8) % 2:
                pen.rectangle((left, top, left + 49, top + 49), fill=(181, 136, 99))
        for field in generator.permutation(64)[: generator.integers(6, 33)]:
            piece = chr(0x2654 + generator.integers(12))
            pen.text((field % 8 * 50 + 4, field // 8 * 50 - 2), piece, font=font, fill="black")
        yield board


def spectrograms(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield spectrograms of a second of noise with one to five tones."""
    time_T = np.arange(16000) / 16000
    for _ in range(600):
        sound_T = generator.normal(scale=0.05, size=16000)
        for _ in range(generator.integers(1, 6)):
            low, rise, start = generator.uniform((100, -1000, 0), (4000, 1000, 0.7))
            tone_T = np.sin(2 * np.pi * (low * time_T + rise * time_T * time_T))
            sound_T += tone_T * (time_T > start)
        parts = np.lib.stride_tricks.sliding_window_view(sound_T, 256)[::124] * np.hanning(256)
        power = np.log(np.abs(np.fft.rfft(parts)).T + 1e-3)
        level = (power - power.min()) / np.ptp(power)
        colours = mpl.colormaps["viridis"](level)[:, :, :3]
        yield Image.fromarray((255 * colours).astype(np.uint8))


def flags(generator: np.random.Generator) -> Iterator[Image.Image]:
    """Yield all flags of three stripes of eight colours. Two neighbours differ, in either order."""
    colours = "white", "black", "red", "green", "blue", "yellow", "orange", "purple"
    rows = [
        row
        for row in itertools.product(colours, repeat=3)
        if row[0] <= row[2] and row[1] not in (row[0], row[2])
    ]
    for number in generator.permutation(2 * len(rows)):
        flag = Image.new("RGB", (90, 90))
        for stripe, colour in enumerate(rows[number // 2]):
            ImageDraw.Draw(flag).rectangle((0, 30 * stripe, 89, 30 * stripe + 29), fill=colour)
        yield flag.transpose(Image.Transpose.TRANSPOSE) if number % 2 else flag


DRAWN: dict[str, tuple[Callable[[np.random.Generator], Iterator[Image.Image]], int]] = {
    "pages of code": (pages, 500),
    "characters": (characters, 2000),
    "plots": (plots, 500),
    "chess boards": (boards, 1000),
    "spectrograms": (spectrograms, 600),
    "flags": (flags, 600),
}


COPIES = ("JPEG, quality 50", "resized by 0.75 and back", "mirrored", "20 % darker")


def admit(door: NearDuplicates, memory: WorkingMemory, picture_NCHW: Tensor) -> list[Pair]:
    """Add all pictures but near-duplicates, and return these, each with what it repeats."""
    found: list[Pair] = []
    for ids_B in torch.arange(len(picture_NCHW)).split(BATCH):
        batch, held = picture_NCHW[ids_B], len(memory)
        test = door.find(batch, batch[:0], "refuse", ids_B)
        assert test.nearest_B is not None
        for at in np.flatnonzero(~test.admitted_B):
            near = int(test.nearest_B[at])
            twin = memory.ids[near] if near < held else ids_B[near - held]
            found.append((int(ids_B[at]), int(twin)))
        new_B = torch.from_numpy(test.admitted_B)
        z_BD = torch.tensor([[1.0, 0.0]]).expand(int(new_B.sum()), 2)
        memory.add(ids_B[new_B], z_BD, batch[new_B])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drawn_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=Path, help="the picture to write")
    chosen = parser.parse_args()
    shown = Image.new("RGB", (SHOWN * 210, len(DRAWN) * 110), "grey")
    for row, (kind, (draw, count)) in enumerate(DRAWN.items()):
        every = islice(draw(np.random.default_rng(0)), count)
        pictures = np.stack([np.asarray(image.resize((SIDE, SIDE))) for image in every])
        memory = WorkingMemory(count, 2, image_shape=(3, SIDE, SIDE))
        door = NearDuplicates(memory)
        pairs = admit(door, memory, tensor(pictures))
        print(f"{kind}: {len(pairs) / len(pictures):.1%} of {len(pictures)} dropped")
        for name in COPIES:
            copies = tensor(np.stack([KINDS[name](picture) for picture in pictures[:100]]))
            test = door.find(copies, copies[:0], "refuse", torch.arange(-100, 0))
            print(f"  {name}: {100 - test.admitted_B.sum()} of 100 copies found")
        for column, pair in enumerate(pairs[:: max(1, len(pairs) // SHOWN)][:SHOWN]):
            for side, number in enumerate(pair):
                shown.paste(
                    Image.fromarray(pictures[number]), (column * 210 + side * 98, row * 110 + 7)
                )
    if chosen.pairs is not None:
        shown.save(chosen.pairs)


if __name__ == "__main__":
    main()
