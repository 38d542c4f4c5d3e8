import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ncd_training.data.manifest import Manifest, from_folders
from ncd_training.data.scan import Findings, scan, typical_side
from PIL import Image

from ncd_serve.errors import DataError
from ncd_serve.preprocess import MAX_BYTES
from ncd_serve.progress import silent


def picture(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for number, name in enumerate(("known/a/1", "known/a/2", "known/b/1", "known/b/2", "pile/x", "pile/deep/y")):
        picture(tmp_path / f"{name}.png", number)
    return tmp_path


def look(root: Path, *, strict: bool = False) -> tuple[Manifest, Findings]:
    return scan(from_folders(root / "known", root / "pile"), track=silent, strict=strict)


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is huge."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_good_images_stay(folders: Path) -> None:
    manifest, findings = look(folders)
    assert (len(manifest.labelled), len(manifest.unlabelled), findings) == (4, 2, Findings())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"GIF-like but text", "not an image of a known format"),
        (bomb(12_000, 12_000), "12000 x 12000 px are more than"),
        ("truncated", "cannot be decoded"),
        ("too many bytes", "bytes are more than"),
        ("gone", "cannot be read: No such file"),
    ],
    ids=["empty", "text", "bomb", "truncated", "too many bytes", "gone"],
)
def test_bad_files_are_named_and_skipped_or_fatal(content: bytes | str, reason: str, folders: Path) -> None:
    bad = folders / "pile" / "bad.jpg"
    Image.effect_noise((300, 300), 90).save(bad)
    if content == "truncated":
        bad.write_bytes(bad.read_bytes()[:5000])
    elif content == "too many bytes":
        with bad.open("wb") as stream:
            stream.truncate(MAX_BYTES + 1)
    elif isinstance(content, bytes):
        bad.write_bytes(content)
    listed = from_folders(folders / "known", folders / "pile")
    if content == "gone":
        bad.unlink()
    manifest, findings = scan(listed, track=silent)
    assert bad not in manifest.unlabelled
    assert [finding.path for finding in findings.skipped] == [bad]
    assert reason in findings.skipped[0].reason
    with pytest.raises(DataError, match=rf"1 images cannot be used\nskipped {bad}") as caught:
        scan(listed, track=silent, strict=True)
    assert caught.value.exit_code == 3


def test_hidden_files_are_not_looked_at(folders: Path) -> None:
    for name in ("pile/.ipynb_checkpoints/x.png", "pile/._x.png", "known/.ipynb_checkpoints/x.png", "known/a/.x.png"):
        (folders / name).parent.mkdir(exist_ok=True)
        (folders / name).write_text("not an image")
    manifest, findings = look(folders, strict=True)
    assert (len(manifest.images), findings) == (6, Findings())


def test_of_duplicates_the_labelled_and_the_first_stay(folders: Path) -> None:
    picture(folders / "pile" / "also-a.png", 0)
    picture(folders / "pile" / "z.png", 4)
    manifest, findings = look(folders)
    assert [path.name for path in manifest.unlabelled] == ["y.png", "x.png"]
    assert {finding.path.name: finding.reason for finding in findings.skipped} == {
        "also-a.png": f"same bytes as {folders / 'known' / 'a' / '1.png'}",
        "z.png": f"same bytes as {folders / 'pile' / 'x.png'}",
    }
    with pytest.raises(DataError, match="2 images cannot be used"):
        look(folders, strict=True)


def test_training_images_win_over_test_images_and_truth_follows(folders: Path) -> None:
    twin, held_out = picture(folders / "test" / "twin.png", 5), picture(folders / "test" / "own.png", 9)
    (folders / "pile" / "broken.png").write_bytes(b"")
    listed = from_folders(folders / "known", folders / "pile")
    assert [path.name for path in listed.unlabelled] == ["broken.png", "y.png", "x.png"]
    listed = replace(listed, truth=[7, 8, 9], novel_test=((twin, 0), (held_out, 1)), known_test=((twin, 1),))
    manifest, findings = scan(listed, track=silent)
    assert (manifest.truth, manifest.novel_test, manifest.known_test) == ([8, 9], ((held_out, 1),), ())
    assert len(findings.skipped) == 3


def test_a_file_that_is_both_labelled_and_in_the_pile_counts_as_labelled(folders: Path) -> None:
    listed = from_folders(folders / "known", folders)
    manifest, findings = scan(listed, track=silent)
    assert (len(manifest.labelled), len(manifest.unlabelled)) == (4, 2)
    assert {finding.reason for finding in findings.skipped} == {"listed twice"}


def test_a_published_split_keeps_its_duplicates_but_not_its_broken_files(folders: Path) -> None:
    picture(folders / "pile" / "z.png", 4)
    (folders / "pile" / "broken.png").write_bytes(b"")
    listed = replace(from_folders(folders / "known", folders / "pile"), published=True)
    manifest, findings = scan(listed, track=silent)
    assert len(manifest.unlabelled) == 3
    assert [finding.path.name for finding in findings.skipped] == ["broken.png"]
    assert [finding.path.name for finding in findings.duplicates] == ["z.png"]
    (folders / "pile" / "broken.png").unlink()
    listed = replace(from_folders(folders / "known", folders / "pile"), published=True)
    assert len(scan(listed, track=silent, strict=True)[0].unlabelled) == 3


def test_a_pile_of_nothing_usable_is_an_error(folders: Path) -> None:
    for path in (folders / "pile").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 2 unlabelled images can be used") as caught:
        look(folders)
    assert "the file is empty" in (caught.value.hint or "")


def test_long_lists_are_shortened(folders: Path) -> None:
    for number in range(13):
        (folders / "pile" / f"bad{number:02d}.png").write_bytes(b"")
    _, findings = look(folders)
    assert len(findings.lines()) == 13
    assert len(findings.lines(10)) == 11
    assert findings.lines(10)[-1] == "skipped 3 more"


def test_the_typical_side_is_the_median_of_the_images_that_can_be_read(tmp_path: Path) -> None:
    for number, size in enumerate(((40, 30), (90, 50), (60, 80))):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert typical_side(sorted(tmp_path.iterdir())) == 50
    assert typical_side([tmp_path / "broken.png"]) is None
