from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncd_serve import reference
from ncd_serve.errors import DataError
from ncd_serve.reference import Reference


def example(images: int = 7) -> Reference:
    rng = np.random.default_rng(0)
    return Reference(
        checkpoint="0123456789ab",
        root=Path("/where/they were"),
        paths=[f"{number}/ünï <b>.png" for number in range(images)],
        cluster_ids=np.arange(images) % 3,
        confidences=rng.random(images, np.float32),
        embeddings=rng.random((images, 4), np.float32),
        known_ids=np.arange(images) % 2,
        known_classes=["gull", "owl"],
        known_clusters=0,
        counts=np.bincount(np.arange(images) % 3, minlength=4),
        truth=[],
        aside_paths=["aside/<b>.png"],
        aside_ids=np.array([2]),
        aside_confidences=np.array([0.5], np.float32),
        aside_embeddings=np.ones((1, 4), np.float32),
        aside_known_ids=np.array([1]),
        matched=["gull", "", "tern", ""],
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = example()
    written.write(tmp_path / "reference.npz")
    read = Reference.read(tmp_path / "reference.npz")
    assert (read.checkpoint, read.root, read.paths) == (written.checkpoint, written.root, written.paths)
    assert (read.known_classes, read.truth, read.clusters) == (["gull", "owl"], [], 4)
    assert read.matched == ["gull", "", "tern", ""]
    np.testing.assert_allclose(read.embeddings, written.embeddings, atol=1e-3)
    assert read.confidences.tolist() == written.confidences.tolist()
    assert (read.aside_paths, read.aside_ids.tolist()) == (["aside/<b>.png"], [2])
    assert [file.name for file in read.every_file()][-2:] == ["ünï <b>.png", "<b>.png"]
    assert read.files(Path("now"))[0] == Path("now/0/ünï <b>.png")


def test_of_many_images_an_even_sample_is_kept_but_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_IMAGES", 4)
    sample = replace(example(), truth=list("abcdefg")).sampled()
    assert sample.paths == [example().paths[row] for row in (0, 2, 4, 6)]
    assert sample.truth == ["a", "c", "e", "g"] and sample.embeddings.shape == (4, 4)
    assert sample.counts.sum() == 7 and sample.matched == example().matched


def test_missing_and_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    with pytest.raises(DataError, match=r"has no reference\.npz") as missing:
        Reference.read(path)
    assert "ncd-serve evaluate" in str(missing.value.hint)
    example().write(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is damaged"):
        Reference.read(path)


def test_a_file_of_an_older_version_has_no_matching_and_opens(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    example().write(path)
    with np.load(path) as stored:
        newer = dict(stored)
    np.savez(path, **{**newer, "aside_ids": np.zeros(0, np.int64)})
    with pytest.raises(DataError, match="is damaged: its images of no cluster are incomplete"):
        Reference.read(path)
    older = {name: newer[name] for name in newer if name != "matched" and not name.startswith("aside")}
    np.savez(path, **older)
    assert Reference.read(path).matched == []
    np.savez(path, **older, matched=["tern"])
    with pytest.raises(DataError, match="is damaged"):
        Reference.read(path)
    del older["counts"]
    np.savez(path, **older)
    with pytest.raises(DataError, match="is damaged"):
        Reference.read(path)
