"""The run or bundle that a studio shows: its page, its pictures, and what people say about its clusters."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ncd_serve.bundle import MANIFEST, Bundle
from ncd_serve.errors import DataError, UsageError, needs_extra
from ncd_serve.gallery.build import lay_out
from ncd_serve.gallery.page import naming_data, page_data
from ncd_serve.gallery.projection import MapKind
from ncd_serve.gallery.read import naming_of, read_source
from ncd_serve.gallery.thumbnails import draw_sheet, tile_size
from ncd_serve.inputs.images import Source
from ncd_serve.places import ExportPlace, export_place, title_of
from ncd_serve.rows.assignment import assign_images
from ncd_serve.runners import OnnxRunner
from ncd_serve.studio.candidates import EmbeddingRunner, NewImage, NewImages
from ncd_serve.studio.splits import propose_splits
from ncd_serve.triton.registry import server_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncd_serve.gallery.collection import Collection
    from ncd_serve.naming import Names
    from ncd_serve.prediction import Prediction
    from ncd_serve.progress import Progress

MAX_TSNE_IMAGES = 1500  # a few seconds: a studio opens at once
_NEW = "new_categories"
_KEPT_SHEETS = 400  # some 60 MB


class Project:
    """An opened run or bundle. Images are known to the page by their numbers in the order of its sheets."""

    def __init__(
        self, source: Path, *, progress: Progress, images: Path | None = None, shown: Collection | None = None
    ) -> None:
        self.source = source
        self.key = secrets.token_hex(4)  # of its pictures' addresses: browsers keep those
        self._shown = shown or read_source(source, images=images, progress=progress)
        kind = None if len(self._shown.paths) <= MAX_TSNE_IMAGES else MapKind.PCA
        self._layout = lay_out(self._shown, kind=kind, progress=progress)
        missing = [number for number, row in enumerate(self._layout.order) if not self._shown.files[row].is_file()]
        self._facts = page_data(self._shown, self._layout, missing=missing, title=title_of(source))
        self._pictures = self._shown.pictures
        self._sheets: OrderedDict[int, bytes] = OrderedDict()
        self._lock, self._model_lock = Lock(), Lock()
        self._runner: OnnxRunner | None = None
        self._new_images = NewImages()

    @property
    def bundle(self) -> Path | None:
        """The exported bundle, if there is one."""
        folders = (self.source, self.source / "bundle")
        return next((folder for folder in folders if (folder / MANIFEST).is_file()), None)

    @property
    def place(self) -> ExportPlace:
        """Repository and model that the bundle was exported to, or would be."""
        return export_place(self.bundle or self.source)

    def page_data(self) -> dict[str, Any]:
        """Return the data of the page, with what the bundle says by now."""
        facts = self._facts | {"bundle": str(self.bundle) if self.bundle else None}
        if self.bundle:
            named = replace(self._shown, naming=naming_of(Bundle.read(self.bundle)))
            facts |= naming_data(named, self._layout.order)
        return facts

    def sheet(self, number: int) -> bytes:
        """Return a sheet of thumbnails as a JPEG file."""
        with self._lock:
            if number in self._sheets:
                self._sheets.move_to_end(number)
                return self._sheets[number]
        if not 0 <= number < len(self._layout.sheets):
            raise DataError(f"no sheet {number}")
        size = tile_size(len(self._shown.paths))
        content, _ = draw_sheet(self._layout.sheets[number], files=self._pictures, size=size)
        with self._lock:
            self._sheets[number] = content
            while len(self._sheets) > _KEPT_SHEETS:
                self._sheets.popitem(last=False)
        return content

    def file(self, number: int) -> Path:
        """Return the file of an image; no other files can be had."""
        if not 0 <= number < len(self._layout.order):
            raise DataError(f"no image {number}")
        return self._shown.files[self._layout.order[number]]

    def splits(self, images: Sequence[int]) -> list[dict[str, Any]]:
        """Return proposals to split these images, each a list of groups of their numbers."""
        if self._shown.embeddings is None:
            raise UsageError("these images have no embeddings", hint="open a run or a bundle")
        if not images or min(images) < 0 or max(images) >= len(self._layout.order):
            raise DataError("no such images")
        vectors = self._shown.embeddings[[self._layout.order[number] for number in images]]
        return [
            {"apart": split.words, "groups": [[images[row] for row in group] for group in split.groups]}
            for split in propose_splits(vectors)
        ]

    def apply(self, names: Names) -> dict[str, Any]:
        """Write names and corrections into the bundle and its repository; say where they are, and who serves them."""
        if self.bundle is None:
            raise DataError(f"{self.source} was not exported yet", hint=f"ncd-serve export {self.source}")
        with needs_extra("export"):
            from ncd_export.rename import rename_bundle
        with self._model_lock:
            place = self.place
            bundle, version = rename_bundle(self.bundle, names, repository=place.repository, name=place.model)
            self._runner = None
        server = server_of(place.repository)
        return {
            "bundle": str(bundle.folder),
            "repository": str(place.repository),
            "model": place.model,
            "version": version.name,
            "server": server.grpc_url if server else None,
        }

    def predict(self, content: bytes, name: str, kept: NewImage | None = None) -> Prediction:
        """Return the row of one image file, by the bundle's model in this process; `kept` is looked at with others."""
        with self._model_lock:
            if self.bundle is None:
                raise DataError(f"{self.source} was not exported yet", hint=f"ncd-serve export {self.source}")
            if self._runner is None:
                self._runner = OnnxRunner(self.bundle)
            runner = EmbeddingRunner(self._runner) if kept else self._runner
            (row,) = assign_images([Source(name, lambda: content)], runner)
        if kept and isinstance(runner, EmbeddingRunner) and runner.embeddings is not None:
            self._new_images.keep(kept, runner.embeddings[0])
        return row

    def candidates(self, page: str) -> list[dict[str, Any]]:
        """Return groups of the new images of a page that are probably new categories."""
        return self._new_images.candidates(page, Bundle.read(self.bundle)) if self.bundle else []

    @property
    def new_categories(self) -> Path:
        """Folder of new images with a category: in a run, beside a bundle, whose files are fixed."""
        whole = self.source.resolve()
        return whole.with_name(f"{whole.name}.{_NEW}") if self.bundle == self.source else whole / _NEW
