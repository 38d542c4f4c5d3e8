"""Rows of predictions as csv, jsonl, parquet, or a table on the terminal. One schema for all of them."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from rich.markup import escape
from rich.table import Table

from ncd_serve.errors import UsageError
from ncd_serve.files import atomic_path
from ncd_serve.prediction import COLUMNS, Prediction

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMATS = (".csv", ".jsonl", ".parquet")


def check_format(target: Path) -> None:
    """Refuse an output file whose kind we do not know, before any work is done."""
    if target.suffix not in FORMATS:
        raise UsageError(f"cannot write '{target.name}'", hint=f"use a file ending in {', '.join(FORMATS)}")


def write_rows(rows: Iterable[Prediction], target: Path) -> None:
    """Write rows to a file of the kind its name says, atomically."""
    check_format(target)
    with atomic_path(target) as temporary:
        if target.suffix == ".parquet":
            _write_parquet(rows, temporary)
        else:
            with temporary.open("w", encoding="utf-8", newline="") as stream:
                (write_csv if target.suffix == ".csv" else write_jsonl)(rows, stream)


def write_csv(rows: Iterable[Prediction], stream: TextIO) -> None:
    """Comma-separated, `top_k` as JSON, numbers in full precision."""
    writer = csv.DictWriter(stream, COLUMNS)
    writer.writeheader()
    for row in rows:
        record = _record(row)
        writer.writerow({**record, "top_k": json.dumps(record["top_k"], ensure_ascii=False)})


def write_jsonl(rows: Iterable[Prediction], stream: TextIO) -> None:
    """One JSON object a line."""
    for row in rows:
        stream.write(json.dumps(_record(row), ensure_ascii=False) + "\n")


def terminal_table(rows: Iterable[Prediction], *, title: str | None = None) -> Table:
    """A table for people."""
    table = Table(title=title, title_justify="left")
    for name in ("image", "cluster", "name", "confidence", "margin"):
        # Folded, not cut: the end of a path is what tells images apart.
        table.add_column(
            name, justify="right" if name in {"cluster", "confidence", "margin"} else "left", overflow="fold"
        )
    for row in rows:
        if row.status == "error":
            table.add_row(escape(row.path), "-", f"[red]{escape(row.error or '')}[/red]", "-", "-")
        else:
            numbers = f"{row.confidence:.3f}", f"{row.margin:.3f}"
            table.add_row(escape(row.path), str(row.cluster_id), escape(row.cluster_name or ""), *numbers)
    return table


def _record(row: Prediction) -> dict[str, Any]:
    return {**asdict(row), "top_k": [candidate._asdict() for candidate in row.top_k]}


def _write_parquet(rows: Iterable[Prediction], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    candidate = pa.struct([("cluster_id", pa.int64()), ("cluster_name", pa.string()), ("probability", pa.float64())])
    kinds = {"cluster_id": pa.int64(), "confidence": pa.float64(), "margin": pa.float64(), "top_k": pa.list_(candidate)}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist([_record(row) for row in rows], schema), target)
