"""Very many images in blocks: how the work is cut, what a block means, and the folder that its rows go to."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ncd_serve.errors import DataError, MissingExtraError, UsageError
from ncd_serve.inputs.images import Source
from ncd_serve.inputs.sources import find_sources

if not find_spec("fsspec") and "CI" not in os.environ:
    pytest.skip("fsspec is not installed: pip install 'ncd-serve[ray]'", allow_module_level=True)

from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from ncd_serve.bulk.blocks import Block, cut, images_of
from ncd_serve.bulk.parts import PLAN, Order, check_folder, finished, part_name, read_block, write_plan
from ncd_serve.bulk.storage import Folder

ORDER = Order("b1", "c1", ["photos", "more"], top_k=3, min_confidence=0.0, block=2, allow_urls=False)


def picture(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (shade,) * 3).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven images, and nothing else in the folder that words are relative to."""
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return tmp_path / "photos"


def pack(path: Path, images: list[Path]) -> Path:
    with tarfile.open(path, "w") as archive:
        for image in images:
            archive.add(image, image.name)
    return path


def found(source: Source) -> tuple[str, bytes | str]:
    try:
        data = source.read()
    except DataError as error:
        return source.path, str(error)
    return source.path, data if isinstance(data, bytes) else data.read_bytes() if data.is_file() else "gone"


def all_of(*words: object, size: int = 3, allow_urls: bool = False) -> list[tuple[str, bytes | str]]:
    blocks = cut(map(str, words), size=size, allow_urls=allow_urls)
    return [found(source) for block in blocks for source in images_of(block)]


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    storage = MemoryFileSystem()
    storage.store.clear()
    yield storage
    storage.store.clear()


def test_blocks_have_a_fixed_number_of_images_whatever_the_words_are(photos: Path) -> None:
    blocks = list(cut(["photos/a", "photos/b", "photos/a/0.png"], size=3, allow_urls=False))
    assert [len(block.paths) for block in blocks] == [3, 3, 2]
    assert [Path(path).stem for block in blocks for path in block.paths] == list("02461350")


def test_the_images_are_those_of_the_plain_engine(photos: Path) -> None:
    shard = pack(photos.parent / "x.tar", sorted(photos.rglob("*.png")))
    for words in (["photos"], ["photos/*/?.png"], [shard], [shard, "photos/b", shard]):
        assert all_of(*words) == list(map(found, find_sources(words).images))


def test_a_list_on_standard_input_is_cut_while_it_comes(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"photos/a/0.png\n\ngone.png\ns3://store/x.png\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert all_of("-") == [
        ("photos/a/0.png", picture(0)),
        ("gone.png", "gone"),
        ("s3://store/x.png", "a URL, but no --allow-urls"),
    ]


def test_rows_of_names_are_cut_into_blocks_and_rows_of_images_are_not(photos: Path) -> None:
    images = sorted(photos.rglob("*.png"))
    pq.write_table(pa.table({"path": [*map(str, images[:3]), "", None]}), "names.parquet", row_group_size=3)
    pq.write_table(
        pa.table({"id": range(5), "bytes": [image.read_bytes() for image in images[:5]]}),
        "images.parquet",
        row_group_size=3,
    )
    blocks = list(cut(["names.parquet", "images.parquet"], size=2, allow_urls=False))
    where = [(block.shard, block.row_group, block.start, block.stop) for block in blocks]
    assert where == [
        ("names.parquet", 0, 0, 2),
        ("names.parquet", 0, 2, 3),
        ("names.parquet", 1, 0, 2),
        ("images.parquet", 0, 0, 3),
        ("images.parquet", 1, 0, 2),
    ]
    named, held = all_of("names.parquet", size=2), all_of("images.parquet", size=2)
    assert named == [
        *((str(path), path.read_bytes()) for path in images[:3]),
        ("names.parquet/3", "the row has no path"),
        ("names.parquet/4", "the row has no path"),
    ]
    assert held == [(str(number), path.read_bytes()) for number, path in enumerate(images[:5])]


def test_the_blocks_of_a_long_row_group_hold_each_row_once(photos: Path) -> None:
    names = [f"{number}.jpg" for number in range(25_000)]
    pq.write_table(pa.table({"path": names}), "names.parquet")
    blocks = list(cut(["names.parquet"], size=7_000, allow_urls=False))
    assert len(blocks) == 4
    assert [image.path for block in blocks for image in images_of(block)] == names


def test_images_without_names_are_called_by_their_row(photos: Path) -> None:
    data = [
        {"bytes": picture(1), "path": "x.png"},
        {"bytes": None, "path": "x.png"},
        {"bytes": picture(2), "path": None},
    ]
    pq.write_table(pa.table({"image": data, "label": [0, 1, 2]}), "hub.parquet", row_group_size=1)
    assert all_of("hub.parquet") == [
        ("hub.parquet/0", picture(1)),
        ("hub.parquet/1", "the row has no image"),
        ("hub.parquet/2", picture(2)),
    ]


def test_a_table_without_images_is_refused_at_once(photos: Path) -> None:
    pq.write_table(pa.table({"file": ["photos/a/0.png"], "id": [1]}), "odd.parquet")
    with pytest.raises(DataError, match=r"its columns are file, id") as refused:
        all_of("photos", "odd.parquet")
    assert "column `path`" in str(refused.value.hint)


def test_damaged_shards_cost_a_row_each(photos: Path) -> None:
    images = sorted(photos.rglob("*.png"))
    pq.write_table(pa.table({"bytes": [image.read_bytes() for image in images]}), "whole.parquet")
    Path("cut.parquet").write_bytes(Path("whole.parquet").read_bytes()[:-20])
    scratched = bytearray(Path("whole.parquet").read_bytes())
    scratched[4:40] = bytes(36)
    Path("scratched.parquet").write_bytes(scratched)
    Path("no.tar").write_bytes(b"hello" * 300)
    cut_off = pack(Path("cut.tar"), images)
    cut_off.write_bytes(cut_off.read_bytes()[:2000])
    rows = all_of("no.tar", "cut.parquet", "scratched.parquet", "cut.tar", "photos")
    assert [path for path, _ in rows[:5]] == ["no.tar", "cut.parquet", "scratched.parquet", "cut.tar/0.png", "cut.tar"]
    assert all("nothing more can be read" in str(rows[index][1]) for index in (0, 1, 2, 4))
    assert [data for _, data in rows[5:]] == [image.read_bytes() for image in images]


def test_stores_are_read_as_disks_are(photos: Path, memory: MemoryFileSystem) -> None:
    images = sorted(photos.rglob("*.png"))
    pq.write_table(pa.table({"bytes": [image.read_bytes() for image in images]}), "x.parquet")
    pack(Path("x.tar"), images)
    for shard in ("x.tar", "x.parquet"):
        memory.pipe(f"/shards/{shard}", Path(shard).read_bytes())
    for image in images:
        memory.pipe(f"/{image.relative_to(photos.parent)}", image.read_bytes())
    memory.pipe("/photos/.hidden.png", b"")
    memory.pipe("/photos/notes.txt", b"")
    for words in (["photos"], ["photos/*/?.png"], ["photos/a/0.png"]):
        assert all_of(f"memory://{words[0]}") == [(f"memory:///{path}", data) for path, data in all_of(*words)]
    assert all_of("memory://shards/x.*") == [
        (f"memory:///shards/{path}", data) for path, data in all_of("x.parquet", "x.tar")
    ]
    with pytest.raises(DataError, match="no images at memory://shards") as refused:
        all_of("memory://shards")
    assert "'memory://shards/*.tar'" in str(refused.value.hint)
    memory.pipe("/photos/gone.parquet", table_of(["memory://photos/a/0.png", "memory://photos/none.png"]))
    first, second = all_of("memory://photos/gone.parquet", allow_urls=True)
    assert first == ("memory://photos/a/0.png", picture(0)) and "no such file" in str(second[1])
    assert all_of("memory://photos/gone.parquet")[0][1] == "a URL, but no --allow-urls"


def table_of(paths: list[str]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"path": paths}), stream)
    return stream.getvalue()


def test_http_needs_leave_as_everywhere() -> None:
    with pytest.raises(UsageError, match="is a URL"):
        cut(["https://host/x.tar"], size=1, allow_urls=False)


class Locked(MemoryFileSystem):
    """What a store's own library does where nobody gave it credentials."""

    def info(self, path: str, **_: object) -> dict[str, object]:
        raise RuntimeError("Unable to locate credentials")

    def exists(self, path: str, **_: object) -> bool:
        return bool(self.info(path))


def test_credentials_are_asked_for_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "s3", Locked)
    for attempt in (
        lambda: cut(["s3://store/photos"], size=1, allow_urls=False),
        lambda: Folder("s3://store/x").names(),
    ):
        with pytest.raises(DataError, match=r"s3://store/.* cannot be used: Unable to locate credentials") as refused:
            attempt()
        assert "AWS_ACCESS_KEY_ID" in str(refused.value.hint)


@pytest.mark.skipif(bool(find_spec("s3fs")), reason="s3fs is installed")
def test_the_package_of_a_store_is_named() -> None:
    with pytest.raises(MissingExtraError, match="needs s3fs") as refused:
        cut(["s3://store/photos"], size=1, allow_urls=False)
    assert refused.value.hint == "pip install s3fs"


@pytest.mark.parametrize("place", ["out", "memory://out"])
def test_a_plan_is_kept_and_read_block_by_block(photos: Path, memory: MemoryFileSystem, place: str) -> None:
    folder = Folder(place)
    odd = os.fsdecode(b"caf\xe9.png")
    blocks = [Block([f"{number}.png", odd]) for number in range(250)] + [Block(shard="x.parquet", row_group=2, stop=9)]
    assert check_folder(folder, ORDER, resume=False) is None
    plan = write_plan(folder, ORDER, iter(blocks))
    assert (plan.blocks, plan.home) == (251, str(photos.parent))
    assert check_folder(folder, ORDER, resume=True) == plan
    assert [read_block(folder, number) for number in (0, 99, 100, 249, 250)] == [
        blocks[n] for n in (0, 99, 100, 249, 250)
    ]
    assert finished(folder) == set()
    with folder.writing(part_name(7)) as target:
        pq.write_table(pa.table({"path": ["x"]}), target)
    with pytest.raises(KeyboardInterrupt), folder.writing(part_name(8)) as target:
        target.write_bytes(b"half")
        raise KeyboardInterrupt
    assert finished(folder) == {7}
    assert sorted(folder.names()) == [PLAN, "part-0000007.parquet"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bundle": "b2"}, "started with bundle b1, not b2"),
        ({"sources": ["photos"]}, "started with sources photos more, not photos"),
        ({"top_k": 1}, "started with top-k 3, not 1"),
    ],
)
def test_rows_of_another_order_are_not_gone_on_with(photos: Path, change: dict[str, Any], words: str) -> None:
    folder = Folder("out")
    write_plan(folder, ORDER, iter([Block(["x.png"])]))
    with pytest.raises(DataError, match=words):
        check_folder(folder, Order(**{**vars(ORDER), **change}), resume=True)


def test_a_folder_in_use_is_refused(photos: Path) -> None:
    with pytest.raises(UsageError, match="photos holds other files"):
        check_folder(Folder("photos"), ORDER, resume=True)
    folder = Folder("out")
    write_plan(folder, ORDER, iter([Block(["x.png"])]))
    assert check_folder(folder, ORDER, resume=False) is None, "a plan of which nothing was done"
    Path("out", part_name(0)).touch()
    with pytest.raises(UsageError, match="holds rows of an earlier run") as refused:
        check_folder(folder, ORDER, resume=False)
    assert "--resume" in str(refused.value.hint)
    Path("out", PLAN).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="is damaged"):
        check_folder(folder, ORDER, resume=True)


def test_a_folder_that_cannot_be_written_to(photos: Path) -> None:
    Path("file").touch()
    with pytest.raises(DataError, match=r"cannot write .*file"):
        write_plan(Folder("file/out"), ORDER, iter([Block(["x.png"])]))


def test_what_goes_wrong_beside_a_store_is_not_its_fault(memory: MemoryFileSystem) -> None:
    with pytest.raises(ZeroDivisionError), Folder("memory://out").writing("x"):
        raise ZeroDivisionError
    assert Folder("memory://out").names() == []


def test_no_images_is_an_error_and_leaves_nothing(photos: Path) -> None:
    pq.write_table(pa.table({"path": pa.array([], pa.string())}), "none.parquet")
    with pytest.raises(DataError, match="no images in photos, more"):
        write_plan(Folder("out"), ORDER, cut(["none.parquet"], size=1, allow_urls=False))
    assert not Path("out").exists()


def test_a_long_list_is_planned_in_constant_memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lines:
        def __init__(self, number: int) -> None:
            self.buffer = islice((b"photos/a/%d.png\n" % line for line in count()), number)

    peaks = []
    for lines in (10_000, 40_000):
        monkeypatch.setattr(sys, "stdin", Lines(lines))
        tracemalloc.start()
        write_plan(Folder(f"out-{lines}"), ORDER, cut(["-"], size=40, allow_urls=False))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_pattern_of_archives_means_the_same_as_without_ray(tmp_path: Path) -> None:
    for number in range(2):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as archive:
            archive.writestr("a.png", picture(number))
    pattern = str(tmp_path / "*.zip")
    found = [source.path for block in cut([pattern], size=10, allow_urls=False) for source in images_of(block)]
    assert found == [source.path for source in find_sources([pattern]).images]
    assert found == [f"{tmp_path / name}/a.png" for name in ("0.zip", "1.zip")]
