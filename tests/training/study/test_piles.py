"""Cells of realistic piles: which images they hold, and what a run is told about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ncd_training.data.manifest import Manifest, from_csv
from ncd_training.study.piles import CELLS, FOREIGN, Cell, chosen_cell, draw_pile, write_pile

from ncd_serve.errors import DataError, UsageError

KNOWN, NOVEL, EACH = 6, 4, 40
CLASSES = np.concatenate([np.repeat(np.arange(KNOWN + NOVEL), EACH), [FOREIGN] * 30])


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_holds_what_it_says(cell: str) -> None:
    pile = draw_pile(cell, CLASSES, known=KNOWN, seed=0)
    assert not set(pile.labelled) & set(pile.unlabelled)
    assert set(CLASSES[pile.labelled]) == set(range(KNOWN))
    sizes = np.bincount(CLASSES[pile.unlabelled] - FOREIGN, minlength=KNOWN + NOVEL + 1)
    foreign, known, novel = sizes[0], sizes[1 : KNOWN + 1], sizes[KNOWN + 1 :]
    assert bool(known.any()) == (cell in ("mixed", "wild"))
    assert novel.max() == EACH
    assert novel.min() == (EACH // 20 if cell in ("tail", "wild") else EACH)
    assert foreign == (round(0.05 * (known.sum() + novel.sum())) if cell == "wild" else 0)


def manifest_of(folder: Path) -> Manifest:
    labelled = [(folder / f"k{number}-{row}.png", number) for number in range(2) for row in range(8)]
    novel = [(folder / f"n{number}-{row}.png", number) for number in range(3) for row in range(8)]
    return Manifest(
        "things",
        labelled,
        [path for path, _ in novel],
        ["ant", "bee"],
        3,
        truth=[number for _, number in novel],
        novel_names=("cat", "dog", "eel"),
    )


def test_a_pile_is_a_list_that_a_run_reads(tmp_path: Path) -> None:
    settings = write_pile(Cell("mixed"), manifest_of(tmp_path), seed=0, folder=tmp_path)
    assert (settings["pile"], settings["novel_classes"], settings["dataset"]) == ("mixed", 3, None)
    read = from_csv(settings["manifest"])
    assert (read.known_classes, read.novel_names) == (["ant", "bee"], ("ant", "bee", "cat", "dog", "eel"))
    assert len(read.labelled) == 8 and len(read.unlabelled) == 32 and read.open_world
    assert read.truth is not None
    for path, number in zip(read.unlabelled, read.truth, strict=True):
        assert path.name.startswith(f"k{number}-" if number < 2 else f"n{number - 2}-")
    unknown = write_pile(Cell("unknown"), manifest_of(tmp_path), seed=1, folder=tmp_path)
    assert (unknown["pile"], unknown["novel_classes"]) == ("novel", "auto")
    assert not from_csv(unknown["manifest"]).open_world


def test_a_cell_needs_true_classes_and_wild_needs_foreign_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown cell 'mixd'"):
        chosen_cell("mixd", None)
    for cell, folder in (("wild", None), ("clean", tmp_path)):
        with pytest.raises(UsageError, match="and no other, has foreign images"):
            chosen_cell(cell, folder)
    with pytest.raises(DataError, match="true classes"):
        write_pile(Cell("clean"), Manifest("m", [], [], [], None), seed=0, folder=tmp_path)
