"""Rows of predictions as csv, jsonl, parquet, or a table on the terminal. One schema for all of them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.markup import escape
from rich.table import Table

from ncd_serve.bundle import MAX_CLUSTERS
from ncd_serve.errors import DataError, UsageError, needs_extra
from ncd_serve.files import atomic_path
from ncd_serve.fit import FITS
from ncd_serve.prediction import COLUMNS, Candidate, Prediction
from ncd_serve.text import from_spreadsheet_cell, printable, spreadsheet_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Record = dict[str, Any]


FORMATS = (".csv", ".jsonl", ".parquet")
_ROW_GROUP = 10_000


def check_format(target: Path) -> None:
    """Raise UsageError for an output file of an unknown format, MissingExtraError for Parquet without its package."""
    if target.suffix not in FORMATS:
        raise UsageError(f"cannot write '{target.name}'", hint=f"use a file ending in {', '.join(FORMATS)}")
    _check_parquet(target)


def _check_parquet(file: Path) -> None:
    if file.suffix == ".parquet":
        with needs_extra("parquet"):
            import pyarrow.parquet  # noqa: F401


def partial_path(target: Path) -> Path:
    """Return the file with the rows of an unfinished table: JSON lines for every format."""
    return target.with_name(f"{target.name}.partial.jsonl")


def write_rows(rows: Iterable[Prediction], target: Path, *, resume: bool = False) -> None:
    """Write each row at once to a file beside the table, then write the table atomically.

    With `resume`, the rows follow those of an unfinished table.
    """
    check_format(target)
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("a" if resume else "w", encoding="utf-8") as stream:
            write_jsonl(rows, stream)
        with atomic_path(target) as temporary:
            _convert(partial, temporary, target.suffix)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}", hint="check the folder and its space") from error
    partial.unlink()


def finished_paths(target: Path) -> Iterator[str]:
    """Yield the paths in an unfinished table; a partial row, left by a killed process, is removed."""
    partial, whole = partial_path(target), 0
    with partial.open("rb+") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                path: str = json.loads(line)["path"]
            except (ValueError, KeyError, TypeError):
                raise DataError(f"row {number} of {partial} is damaged", hint=f"start over: rm {partial}") from None
            whole += len(line)
            yield path
        stream.truncate(whole)


def write_csv(rows: Iterable[Prediction], stream: TextIO) -> None:
    """Write comma-separated values, `top_k` as JSON, numbers in full precision."""
    _write_csv(map(_record, rows), stream)


def write_jsonl(rows: Iterable[Prediction], stream: TextIO) -> None:
    """Write one JSON object per line."""
    for row in rows:
        stream.write(json.dumps(_record(row), ensure_ascii=False) + "\n")
        stream.flush()


def write_parquet(rows: Iterable[Prediction], target: Path) -> None:
    """Write a Parquet file in row groups of limited size, which bound memory."""
    _write_parquet(map(_record, rows), target)


def terminal_table(rows: Iterable[Prediction], *, title: str | None = None) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title, title_justify="left")
    for name in ("image", "cluster", "name", "confidence", "margin", "fit"):
        # Folded, not truncated: paths often differ at the end only.
        table.add_column(
            name, justify="right" if name in {"cluster", "confidence", "margin"} else "left", overflow="fold"
        )
    for row in rows:
        if row.status == "error":
            table.add_row(escape(row.path), "-", f"[red]{escape(row.error or '')}[/red]", "-", "-", "-")
        else:
            name = ("[yellow]unsure:[/yellow] " if row.status == "unsure" else "") + escape(row.cluster_name or "")
            numbers = f"{row.confidence:.3f}", f"{row.margin:.3f}"
            table.add_row(escape(row.path), str(row.cluster_id), name, *numbers, row.fit or "-")
    return table


def _record(row: Prediction) -> Record:
    return {**asdict(row), "top_k": [candidate._asdict() for candidate in row.top_k]}


def _convert(partial: Path, target: Path, suffix: str) -> None:
    with partial.open(encoding="utf-8") as lines:
        records = map(json.loads, lines)
        if suffix == ".parquet":
            _write_parquet(records, target)
            return
        with target.open("w", encoding="utf-8", newline="") as stream:
            if suffix == ".csv":
                _write_csv(records, stream)
            else:
                stream.writelines(lines)


def _write_csv(records: Iterable[Record], stream: TextIO) -> None:
    writer = csv.DictWriter(stream, COLUMNS)
    writer.writeheader()
    for record in records:
        cells = {**record, "top_k": json.dumps(record["top_k"], ensure_ascii=False)}
        writer.writerow({name: _cell(value) for name, value in cells.items()})
        stream.flush()


def _cell(value: Any) -> Any:
    return spreadsheet_cell(printable(value)) if isinstance(value, str) else value


def _write_parquet(records: Iterator[Record], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    candidate = pa.struct([("cluster_id", pa.int64()), ("cluster_name", pa.string()), ("probability", pa.float64())])
    kinds = {
        "cluster_id": pa.int64(),
        "confidence": pa.float64(),
        "margin": pa.float64(),
        "outside": pa.float64(),
        "known": pa.float64(),
        "is_novel": pa.bool_(),
        "top_k": pa.list_(candidate),
    }
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    with pq.ParquetWriter(target, schema) as writer:
        while group := list(islice(records, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def _truth(value: Any) -> bool:
    """Return a truth value; CSV files have it as text."""
    if str(value) not in ("True", "False"):
        raise ValueError(f"its is_novel is {value!r}")
    return str(value) == "True"


_KINDS: dict[str, Callable[[Any], Any]] = {
    "cluster_id": int,
    "confidence": float,
    "margin": float,
    "outside": float,
    "known": float,
    "is_novel": _truth,
}
_HINT = "give a file that `ncd-serve query --out` or `ncd-serve assign --out` wrote"


def read_rows(source: str | Path) -> list[Prediction]:
    """Read all rows of a .csv, .jsonl or .parquet file; columns that an older version did not write are empty."""
    source = Path(source)
    if source.suffix not in FORMATS:
        raise UsageError(f"cannot read rows from '{source.name}'", hint=f"use a file ending in {', '.join(FORMATS)}")
    _check_parquet(source)
    rows: list[Prediction] = []
    try:
        rows.extend(map(_prediction, _records(source)))
        return rows
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}", hint=_HINT) from None
    except Exception as error:  # a table of strangers makes its readers raise anything, e.g. RecursionError
        raise DataError(f"{source} is not a table of rows: row {len(rows) + 1}: {error}", hint=_HINT) from None


def _records(source: Path) -> Iterator[Record]:
    if source.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(source).iter_batches():
            yield from batch.to_pylist()
        return
    with source.open(encoding="utf-8", newline="") as stream:
        if source.suffix != ".csv":
            yield from map(json.loads, stream)
            return
        for record in csv.DictReader(stream):
            yield {name: from_spreadsheet_cell(value) for name, value in record.items() if isinstance(value, str)}


def _prediction(record: Record) -> Prediction:
    present = {name: value for name in COLUMNS if (value := record.get(name)) not in (None, "")}
    if "path" not in present or present.get("status") not in ("ok", "unsure", "error"):
        raise ValueError("it has no path or no status")
    if present["status"] != "error" and not {"cluster_id", "confidence"} <= present.keys():
        raise ValueError("it has no cluster or no confidence")
    likeliest = present.get("top_k", [])
    candidates = json.loads(likeliest) if isinstance(likeliest, str) else likeliest
    present |= {name: kind(present[name]) for name, kind in _KINDS.items() if name in present}
    row = Prediction(**present | {"top_k": [Candidate(**candidate) for candidate in candidates]})
    _check(row)
    return row


def _check(row: Prediction) -> None:
    """Raise ValueError for values that no model returns."""
    if row.fit not in (None, *FITS):
        raise ValueError(f"its fit is '{row.fit}', not {', '.join(FITS[:-1])} or {FITS[-1]}")
    probabilities = [("probability", candidate.probability) for candidate in row.top_k]
    for what, value in (
        *((name, getattr(row, name)) for name in ("confidence", "margin", "outside", "known")),
        *probabilities,
    ):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"its {what} is {value!r}")
    for number in (row.cluster_id, *(candidate.cluster_id for candidate in row.top_k)):
        if number is not None and not (isinstance(number, int) and 0 <= number < MAX_CLUSTERS):
            raise ValueError(f"its cluster is {number!r}")
    for text in (row.path, row.cluster_name, row.error, *(candidate.cluster_name for candidate in row.top_k)):
        if not isinstance(text, str | None):
            raise ValueError(f"{text!r} is no text")
