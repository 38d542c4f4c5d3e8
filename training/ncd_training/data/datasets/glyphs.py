"""Embedded data, nothing to download: letters in the fonts that ship with matplotlib.

Consonants are the known classes, vowels the novel ones. Colour, texture, size, slant and position vary, so raw pixels
say little about the class; the fonts give each class many shapes.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ncd_serve.files import atomic_directory
from ncd_serve.progress import Track, silent
from ncd_training.data.datasets.archives import Request, Split, alone, by_folder, published
from ncd_training.data.manifest import Manifest

NOVEL = tuple("AEIOU")
KNOWN = tuple(letter for letter in string.ascii_uppercase if letter not in NOVEL)
SIZE = 32
Pixels = NDArray[np.floating[Any]]
_OVERSAMPLING = 3
_FONTS = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral", "cmr10", "cmb10", "cmss10", "cmtt10")
_STYLES = ("", "-Bold", "-Oblique", "-Italic", "-BoldOblique", "-BoldItalic", "Bol", "Italic", "BolIta")


def write_glyphs(root: Path, *, train: int = 80, test: int = 20, seed: int = 0, track: Track = silent) -> Path:
    """Draw `train` and `test` images of every class into root/{train,test}/<class>/; keep an existing root."""
    if not root.exists():
        with atomic_directory(root) as folder:
            letters = KNOWN + NOVEL
            for number, character in track(enumerate(letters), "drawing glyphs", len(letters)):
                for split, count in (("train", train), ("test", test)):
                    rng = np.random.default_rng([seed, number, split == "test"])
                    _write_class(folder / split / character, character, count, rng)
    return root


def _write_class(folder: Path, character: str, count: int, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        draw_glyph(character, rng).save(folder / f"{character}-{index:03d}.png")


def draw_glyph(character: str, rng: np.random.Generator) -> Image.Image:
    """Draw a character with random font, colours, texture, slant, size and position."""
    side = SIZE * _OVERSAMPLING
    font = ImageFont.truetype(_fonts()[rng.integers(len(_fonts()))], int(side * rng.uniform(0.8, 0.95)))
    mask = Image.new("L", (side, side))
    place = tuple(side / 2 + rng.uniform(-0.04, 0.04, 2) * side)
    ImageDraw.Draw(mask).text(place, character, fill=255, font=font, anchor="mm")
    slant = rng.uniform(-0.12, 0.12)
    mask = mask.transform(
        mask.size, Image.Transform.AFFINE, (1, slant, -slant * side / 2, 0, 1, 0), Image.Resampling.BILINEAR
    )
    mask = mask.rotate(rng.uniform(-6, 6), Image.Resampling.BILINEAR).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    ink, paper = _colours(rng)
    cover = np.asarray(mask, dtype=np.float32)[..., None] / 255
    picture = cover * (ink + _texture(rng)) + (1 - cover) * (paper + _texture(rng))
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


@cache
def _fonts() -> list[Path]:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [path for font in _FONTS for style in _STYLES if (path := folder / f"{font}{style}.ttf").exists()]


def _colours(rng: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Draw colours of a light ink and a dark paper with visible contrast."""
    while True:
        ink, paper = rng.uniform(0, 255, (2, 3))
        if float((ink - paper) @ (0.299, 0.587, 0.114)) > 100:
            return ink, paper


def _texture(rng: np.random.Generator) -> Pixels:
    """Draw a smooth gradient with some grain, [SIZE, SIZE, 3]."""
    corners = Image.fromarray(rng.uniform(-20, 20, (3, 3)).astype(np.float32)).resize(
        (SIZE, SIZE), Image.Resampling.BICUBIC
    )
    return np.asarray(corners)[..., None] + rng.normal(0, 4, (SIZE, SIZE, 3))


def glyphs(request: Request) -> Manifest:
    """Return the manifest: consonants known, vowels novel. Draw the images at the first use."""
    root = request.root or Path("data") / "glyphs"
    if not root.exists():
        with alone(root):
            write_glyphs(root, track=request.track)
    split = Split(source="glyphs.py", known=KNOWN, novel=NOVEL)
    train, test = (by_folder(root / part, split.classes, track=request.track) for part in ("train", "test"))
    return published(request, split, train=train, test=test)
