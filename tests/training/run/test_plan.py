from dataclasses import replace
from pathlib import Path

from ncd_training.config.resolve import resolve_config
from ncd_training.run.plan import plan_lines

from tests.runs import ready


def test_the_plan_says_what_to_know_about_the_images(glyphs: Path) -> None:
    setup = ready(resolve_config(recipes=["glyphs"], overrides={"data.root": str(glyphs)}))
    noted = replace(setup.manifest, notes=("80 known and 20 novel [variants]", "another number of images"))
    lines = plan_lines(replace(setup, manifest=noted), steps=3, origin=None, folder=None)
    text = "".join(f"{line}\n" for line, _ in lines)
    assert "84 labelled images of 21 known classes, 20 unlabelled images for 5 clusters" in text
    assert "note: 80 known and 20 novel [variants]\nnote: another number of images\n" in text
