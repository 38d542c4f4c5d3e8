"""Folders of this machine, as the form of a training offers them."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from ncd_serve.errors import DataError
from ncd_serve.inputs.images import is_image
from ncd_serve.text import printable

_MAX_SUGGESTED = 50
_MAX_LISTED = 500
_MAX_COUNTED = 1000  # entries of a folder that are looked at


def suggest_folders(typed: str) -> list[str]:
    """Return the folders that begin with what was typed."""
    whole = typed.endswith("/") or not typed
    parent = Path(typed).expanduser() if whole else Path(typed).expanduser().parent
    start = "" if whole else Path(typed).name
    try:
        found = sorted(entry for entry in parent.iterdir() if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        return []
    return [printable(entry) for entry in found if start or not entry.name.startswith(".")][:_MAX_SUGGESTED]


def look_into(typed: str) -> dict[str, Any]:
    """Return a folder's path, its parent, and what is in it and in its folders.

    Where there is no such folder, the nearest one around it is meant. Folders whose names are no text cannot be chosen.
    """
    folder = Path(typed or ".").expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    folder = Path(os.path.normpath(folder))
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot look into {folder}: {error.strerror}", hint="choose another folder") from None
    names = [name for name in found if printable(name) == name][:_MAX_LISTED]
    listed = [{"name": name, "path": str(folder / name), **_contents(folder / name)} for name in names]
    facts = {"path": printable(folder), "parent": printable(folder.parent), "folders": listed}
    return facts | {"all": _MAX_COUNTED} | _contents(folder)


def _contents(folder: Path) -> dict[str, int]:
    """Return the numbers of folders and images that are directly in a folder."""
    inside = images = 0
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_COUNTED):
                inside += entry.is_dir()
                images += is_image(Path(entry.name))
    except OSError:
        pass  # it cannot be read: nothing in it can be trained on
    return {"inside": inside, "images": images}
