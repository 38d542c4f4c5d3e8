"""The one fact about an ONNX file that has to be known before it is opened: whether it reads other files.

Hashes of a bundle cover its ONNX file alone. What that may refer to could be exchanged unnoticed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ncd_serve.errors import DataError

# Numbers of the fields that lead to tensors, by message, as in onnx.proto.
_FIELDS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION, _IN_THIS_FILE = 13, 14, b"\0"  # fields of a tensor, and a value of the second
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_MAX_DEPTH = 50


def check_self_contained(model: Path) -> None:
    """Raise DataError if an ONNX file is damaged or refers to other files."""
    try:
        with (
            model.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            external = _is_external(view, "model", _MAX_DEPTH)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{model} is no ONNX file: {error}", hint="export the run again") from None
    if external:
        raise DataError(
            f"{model} keeps tensors in other files, which no hash covers",
            hint="save it as one file: onnx.save(onnx.load(FILE), FILE)",
        )


def _is_external(data: memoryview, message: str, depth: int) -> bool:
    if not depth:
        raise ValueError("it is nested too deeply")
    for field, payload in _fields(data):
        elsewhere = field == _EXTERNAL_DATA or (field == _DATA_LOCATION and bytes(payload) != _IN_THIS_FILE)
        if message == "tensor" and elsewhere:
            return True
        child = _FIELDS[message].get(field)
        if child and _is_external(payload, child, depth - 1):
            return True
    return False


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of a message in protobuf's encoding."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        start = at
        if tag & 7 == _VARINT:
            _, at = _number(data, at)
        elif tag & 7 == _LENGTH:
            size, start = _number(data, at)
            at = start + size
        elif tag & 7 in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if tag & 7 == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"unknown kind of field at byte {start}")
        if at > len(data):
            raise ValueError("it is cut off")
        with data[start:at] as content:
            yield tag >> 3, content


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of variable length, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
