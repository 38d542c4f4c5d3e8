"""Folder of a bulk run: its plan, which lists the blocks, and one part for each finished block."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ncd_serve.bulk.blocks import Block
from ncd_serve.bulk.storage import Folder, reaching
from ncd_serve.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ncd_serve.bundle import BundleManifest

PLAN = "_plan.parquet"  # readers of a folder of Parquet files pass over what begins so
_PART = re.compile(r"part-(\d+)\.parquet")
_KEY = b"ncd-serve"
_BLOCKS_AT_ONCE = 100
_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("paths", pa.list_(pa.binary())),  # names on disk need not be UTF-8
        ("shard", pa.binary()),
        ("row_group", pa.int64()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("urls", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Order:
    """Settings of a bulk run. Parts of two orders are never mixed in one folder."""

    bundle: str
    checkpoint: str
    sources: list[str]
    top_k: int
    min_confidence: float
    block: int
    allow_urls: bool

    @classmethod
    def of(cls, manifest: BundleManifest, **asked: Any) -> Order:
        """Return the order of rows from a bundle."""
        return cls(bundle=manifest.bundle_id, checkpoint=manifest.checkpoint, **asked)


@dataclass(frozen=True)
class Plan:
    """Plan of a folder: its order, and the number of its blocks."""

    order: Order
    home: str  # where relative paths begin
    blocks: int


def part_name(number: int) -> str:
    """Return the name of the file with the rows of a block."""
    return f"part-{number:07}.parquet"


def finished(folder: Folder) -> set[int]:
    """Return the numbers of the finished blocks."""
    return {int(found[1]) for name in folder.names() if (found := _PART.fullmatch(name))}


def remove_leftovers(folder: Folder) -> None:
    """Remove unfinished files of workers that died."""
    with reaching(str(folder)):
        for path in folder.storage.glob(f"{folder.path}/.part-*"):
            folder.storage.rm(path)


def check_folder(folder: Folder, order: Order, *, resume: bool) -> Plan | None:
    """Return the plan to resume, None for an empty folder; raise where the folder was begun with another order."""
    names = set(folder.names())
    if PLAN not in names:
        if names:
            raise UsageError(f"{folder} holds other files ({min(names)})", hint="give --out a new folder")
        return None
    if not resume:
        if names == {PLAN}:  # nothing was done with it
            return None
        raise UsageError(
            f"{folder} holds rows of an earlier run", hint="continue it with --resume, or start over with a new --out"
        )
    plan = _read(folder)
    for name, before in asdict(plan.order).items():
        if (now := getattr(order, name)) != before:
            raise DataError(
                f"{folder} was started with {name.replace('_', '-')} {_plain(before)}, not {_plain(now)}",
                hint="use the settings that it was started with, or a new --out",
            )
    return plan


def _plain(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def write_plan(folder: Folder, order: Order, blocks: Iterator[Block]) -> Plan:
    """Write the plan, so that a resumed run does not look at the sources again."""
    first = next(blocks, None)
    if first is None:
        raise DataError(f"no images in {', '.join(order.sources)}", hint="check that the sources contain images")
    home = os.getcwd()  # noqa: PTH109
    count = 0
    header = json.dumps({"order": asdict(order), "home": home})
    with folder.writing(PLAN) as target, pq.ParquetWriter(target, _SCHEMA.with_metadata({_KEY: header})) as writer:
        records = map(_record, chain([first], blocks))
        while group := list(islice(records, _BLOCKS_AT_ONCE)):
            numbered = [{"number": number, **record} for number, record in enumerate(group, start=count)]
            writer.write_table(pa.Table.from_pylist(numbered, _SCHEMA))
            count += len(group)
    return Plan(order, home, count)


def _record(block: Block) -> dict[str, Any]:
    return {**vars(block), "paths": list(map(os.fsencode, block.paths)), "shard": os.fsencode(block.shard)}


def read_block(folder: Folder, number: int) -> Block:
    """Read one block of the plan."""
    with folder.open(PLAN) as stream, pq.ParquetFile(stream) as table:
        group = table.read_row_group(number // _BLOCKS_AT_ONCE)
    (record,) = group.slice(number % _BLOCKS_AT_ONCE, 1).drop(["number"]).to_pylist()
    return Block(**record | {"paths": list(map(os.fsdecode, record["paths"])), "shard": os.fsdecode(record["shard"])})


def _read(folder: Folder) -> Plan:
    try:
        with folder.open(PLAN) as stream, pq.ParquetFile(stream) as table:
            header = json.loads(table.schema_arrow.metadata[_KEY])
            return Plan(Order(**header["order"]), header["home"], table.metadata.num_rows)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/{PLAN} is damaged: {error}", hint="give --out a new folder") from None
