"""Check that no pin of constraints.txt was yanked: its authors have taken such a release back.

    .venv/bin/python tools/check_pins.py [constraints.txt]

Asks the package index that pip would ask, and downloads no package. Exit code 1 if a pin was yanked or is not there.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote
from urllib.request import Request, urlopen

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pip._internal.models.index import PyPI

JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 60


class Pin(NamedTuple):
    """Package, and the only version of it that we install."""

    name: str
    version: Version


class File(NamedTuple):
    """File of a package on the index, and the reason why it was yanked; None if it was not."""

    name: str
    yanked: str | None


def read_pins(constraints: Path) -> list[Pin]:
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    wanted = [Requirement(line) for line in lines if line]
    return [Pin(canonicalize_name(each.name), Version(next(iter(each.specifier)).version)) for each in wanted]


def files_of(package: str, index: str) -> list[File]:
    """Return the files of a package; an index answers in JSON (PEP 691) or in HTML (PEP 503)."""
    accepted = f"{JSON}, text/html;q=0.1"
    with urlopen(Request(f"{index.rstrip('/')}/{package}/", headers={"Accept": accepted}), timeout=SECONDS) as answer:
        content, kind = answer.read().decode(), answer.headers.get_content_type()
    if kind != JSON:
        page = _Page()
        page.feed(content)
        return page.files
    return [
        File(entry["filename"], str(entry["yanked"]) if entry.get("yanked") else None)
        for entry in json.loads(content)["files"]
    ]


class _Page(HTMLParser):
    """Page of a package: each link is a file."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if tag == "a" and facts.get("href"):
            name = unquote(str(facts["href"]).partition("#")[0].rpartition("/")[2])
            self.files.append(File(name, (facts["data-yanked"] or "") if "data-yanked" in facts else None))


def version_of(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def problem(pin: Pin, index: str) -> str:
    """Return what is wrong with a pin, or an empty text."""
    try:
        files = [file for file in files_of(pin.name, index) if version_of(file.name) == pin.version]
    except OSError as error:
        return f"{pin.name}: the index does not answer: {error}"
    if not files:
        return f"{pin.name} {pin.version} is not on the index"
    reasons = [file.yanked for file in files if file.yanked is not None]
    return f"{pin.name} {pin.version} was yanked: {reasons[0]}" if len(reasons) == len(files) else ""


def main() -> int:
    constraints = Path(sys.argv[1] if len(sys.argv) > 1 else "constraints.txt")
    index = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
    pins = read_pins(constraints)
    with ThreadPoolExecutor(8) as pool:
        problems = [found for found in pool.map(lambda pin: problem(pin, index), pins) if found]
    print(*problems, f"{len(pins)} pins, {len(problems)} of them with a problem", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
