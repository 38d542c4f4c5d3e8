"""Rows of predictions read back from the files that `tables.py` writes."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

from ncd_serve.errors import DataError, UsageError
from ncd_serve.prediction import COLUMNS, Candidate, Prediction
from ncd_serve.tables import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Record = dict[str, Any]

_NUMBERS = {"cluster_id": int, "confidence": float, "margin": float}
_HINT = "give a file that `ncd-serve query --out` or `ncd-serve assign --out` wrote"


def read_rows(source: Path) -> list[Prediction]:
    """All rows of a .csv, .jsonl or .parquet file; columns that an older version did not write are empty."""
    if source.suffix not in FORMATS:
        raise UsageError(f"cannot read rows from '{source.name}'", hint=f"use a file ending in {', '.join(FORMATS)}")
    rows: list[Prediction] = []
    try:
        rows.extend(map(_prediction, _records(source)))
        return rows
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}", hint=_HINT) from None
    except (ValueError, TypeError, AttributeError, csv.Error) as error:
        raise DataError(f"{source} is not a table of rows: row {len(rows) + 1}: {error}", hint=_HINT) from None


def _records(source: Path) -> Iterator[Record]:
    if source.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(source).iter_batches():
            yield from batch.to_pylist()
        return
    with source.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream) if source.suffix == ".csv" else map(json.loads, stream)


def _prediction(record: Record) -> Prediction:
    present = {name: value for name in COLUMNS if (value := record.get(name)) not in (None, "")}
    if "path" not in present or present.get("status") not in ("ok", "unsure", "error"):
        raise ValueError("it has no path or no status")
    if present["status"] != "error" and not {"cluster_id", "confidence"} <= present.keys():
        raise ValueError("it has no cluster or no confidence")
    likeliest = present.get("top_k", [])
    candidates = json.loads(likeliest) if isinstance(likeliest, str) else likeliest
    present |= {name: kind(present[name]) for name, kind in _NUMBERS.items() if name in present}
    return Prediction(**present | {"top_k": [Candidate(**candidate) for candidate in candidates]})
