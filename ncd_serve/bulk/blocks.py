"""Blocks of work: small descriptions of some images each, which any machine can process, repeatedly if needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ncd_serve.bulk.storage import file_at, reaching, read_url, scheme
from ncd_serve.errors import DataError, UsageError
from ncd_serve.inputs.archives import images_in_archive, is_archive
from ncd_serve.inputs.images import Source, find_images, is_image
from ncd_serve.inputs.sources import STDIN, listed, matching
from ncd_serve.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ncd_serve.bulk.storage import RemoteFile

_FOOTERS_AT_ONCE = 16  # those of remote files are waited for, not computed
_SHARDS_AT_ONCE = 1000
_IMAGES_AT_ONCE, _NAMES_AT_ONCE = 32, 10_000  # of a Parquet file
_PIECE = 1 << 20


@dataclass(frozen=True)
class Block:
    """Unit of work: some image files, an archive, or some rows of one row group of a Parquet file."""

    paths: list[str] = field(default_factory=list)
    shard: str = ""  # an archive or a Parquet file
    row_group: int | None = None  # None: all that the shard has
    start: int = 0
    stop: int | None = None
    urls: bool = False  # whether what it names may be URLs


class _Entry(NamedTuple):
    path: str
    is_shard: bool
    urls: bool


class _Columns(NamedTuple):
    """Columns of a Parquet file that hold the images: their names, and their bytes if it has them."""

    name: str | None
    data: str | None


def cut(words: Iterable[str], *, size: int, allow_urls: bool) -> Iterator[Block]:
    """Cut the named images into blocks of `size`; a shard of images is one block of any size.

    Mistakes in the words are raised at once. A damaged shard is a block too: its row gives the reason.
    """
    entries = [_expand(word, allow_urls) for word in words]
    return _cut(chain.from_iterable(entries), size)


def _cut(entries: Iterator[_Entry], size: int) -> Iterator[Block]:
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for (is_shard, urls), group in groupby(entries, key=lambda entry: (entry.is_shard, entry.urls)):
            while some := list(islice(group, _SHARDS_AT_ONCE if is_shard else size)):
                paths = [entry.path for entry in some]
                if is_shard:
                    yield from chain.from_iterable(pool.map(partial(_cut_shard, size=size, urls=urls), paths))
                else:
                    yield Block(paths, urls=urls)


def _cut_shard(path: str, *, size: int, urls: bool) -> list[Block]:
    if is_archive(file_at(path)):
        return [Block(shard=path)]
    with file_at(path).open("rb") as stream:
        try:
            table = pq.ParquetFile(stream)
        except (pa.ArrowException, OSError):
            return [Block(shard=path)]
        columns = _columns(table.schema_arrow, path)
        rows = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
    # A part of a row group costs as much to read as all before it: much for images, little for their names.
    return [
        Block(shard=path, row_group=group, start=start, stop=min(start + step, count), urls=urls)
        for group, count in enumerate(rows)
        for step in [count if columns.data else size]
        for start in range(0, count, step or 1)
    ]


def _expand(word: str, allow_urls: bool) -> Iterator[_Entry]:
    if word == STDIN:
        return (_Entry(line, is_shard=False, urls=allow_urls) for line in listed())
    if scheme(word):
        return iter(_expand_url(word, allow_urls))
    files = chain.from_iterable([path] if _is_shard(path) else find_images([path]) for path in matching(word))
    return iter([_Entry(str(path), _is_shard(path), urls=allow_urls) for path in files])


def _expand_url(url: str, allow_urls: bool) -> list[_Entry]:
    if scheme(url) in ("http", "https"):
        if not allow_urls:
            raise UsageError(f"{url} is a URL", hint="--allow-urls lets this command fetch images")
        return [_Entry(url, _is_shard(file_at(url)), urls=True)]
    with reaching(url):
        storage, path = fsspec.url_to_fs(url)
        # With their kinds, or each match would be asked for its own.
        found = storage.glob(path, detail=True) if any(sign in path for sign in "*?[") else {path: storage.info(path)}
        files = chain.from_iterable(
            _images_below(storage, place) if facts["type"] == "directory" else [place]
            for place, facts in sorted(found.items())
        )
        urls = [storage.unstrip_protocol(file) for file in files]
    if not urls:
        raise DataError(f"no images at {url}", hint=f"name shards by a pattern: '{url.rstrip('/')}/*.tar'")
    # What a store lists may be read from it. The names in a table need the same leave as everywhere.
    return [_Entry(file, shard, urls=allow_urls or not shard) for file in urls for shard in [_is_shard(file_at(file))]]


def _images_below(storage: Any, path: str) -> list[str]:
    return sorted(file for file in storage.find(path) if is_image(PurePosixPath(file).relative_to(path)))


def _is_shard(file: Path | RemoteFile) -> bool:
    is_file = not isinstance(file, Path) or file.is_file()
    return is_file and (is_archive(file) or file.suffix.lower() == ".parquet")


def images_of(block: Block) -> Iterator[Source]:
    """Yield the images of a block, in order; a damaged shard yields one broken image with the reason."""
    if not block.shard:
        yield from (_named(path, block.urls) for path in block.paths)
        return
    shard = file_at(block.shard)
    try:
        with reaching(block.shard):
            yield from images_in_archive(shard) if is_archive(shard) else _images_in_rows(block)
    except DataError as error:
        yield Source.broken(printable(block.shard), f"nothing more can be read: {error}")


def _images_in_rows(block: Block) -> Iterator[Source]:
    with file_at(block.shard).open("rb") as stream, pq.ParquetFile(stream, buffer_size=_PIECE) as table:
        columns = _columns(table.schema_arrow, block.shard)
        groups = range(table.num_row_groups) if block.row_group is None else [block.row_group]
        before = sum(table.metadata.row_group(number).num_rows for number in range(groups[0])) if groups else 0
        wanted = [name for name in columns if name]
        at_once = _IMAGES_AT_ONCE if columns.data else _NAMES_AT_ONCE
        batches = table.iter_batches(at_once, row_groups=list(groups), columns=wanted)
        rows = (row for batch in _between(batches, block.start, block.stop) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=before + block.start):
            yield _in_row(row, columns, f"{block.shard}/{number}", block.urls)


def _between(batches: Iterable[pa.RecordBatch], start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows from `start` to `stop`; earlier rows, which may be very many, are skipped unread."""
    position = 0
    for batch in batches:
        if stop is not None and position >= stop:
            return
        first = max(0, start - position)
        last = len(batch) if stop is None else min(len(batch), stop - position)
        yield batch.slice(first, max(0, last - first))
        position += len(batch)


def _in_row(row: dict[str, Any], columns: _Columns, otherwise: str, urls: bool) -> Source:
    name = row[columns.name] if columns.name else None
    nameless = name in (None, "")
    path = otherwise if nameless else str(name)
    if columns.data is None:
        return Source.broken(printable(path), "the row has no path") if nameless else _named(path, urls)
    data = row[columns.data]
    image = data["bytes"] if isinstance(data, dict) else data
    return Source.broken(printable(path), "the row has no image") if image is None else Source(path, lambda: image)


def _named(path: str, urls: bool) -> Source:
    if not scheme(path):
        return Source.of(Path(path))
    if not urls:
        return Source.broken(printable(path), "a URL, but no --allow-urls")
    return Source(printable(path), partial(read_url, path))


def _columns(schema: Any, path: str) -> _Columns:
    fields = {field.name: field.type for field in schema}
    data = next((name for name in ("bytes", "image") if name in fields and _holds_bytes(fields[name])), None)
    name = next((name for name in ("path", "id") if name in fields and (data or name == "path")), None)
    if data or name:
        return _Columns(name, data)
    raise DataError(
        f"{path} has no images: its columns are {', '.join(fields) or 'none'}",
        hint="it needs a column `path`, or `bytes` or `image` with image files",
    )


def _holds_bytes(kind: Any) -> bool:
    """Return True for a column of bytes, or of structs of bytes and path as in Hugging Face's datasets."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
