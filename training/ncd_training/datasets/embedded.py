"""The data that needs no archive."""

from __future__ import annotations

from pathlib import Path

from ncd_training.datasets.archives import Request, alone, by_folder, published
from ncd_training.datasets.splits import Split
from ncd_training.glyphs import KNOWN, NOVEL, write_glyphs
from ncd_training.manifest import Manifest


def glyphs(request: Request) -> Manifest:
    """Consonants known, vowels novel; drawn when they are first asked for."""
    root = request.root or Path("data") / "glyphs"
    if not root.exists():
        with alone(root):
            write_glyphs(root, track=request.track)
    split = Split(source="glyphs.py", known=KNOWN, novel=NOVEL)
    train, test = (by_folder(root / part, split.classes, track=request.track) for part in ("train", "test"))
    return published(request, split, train=train, test=test)
