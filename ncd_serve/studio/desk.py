"""Everything that one studio has open: a project, a training, the address of its page."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ncd_serve import __version__
from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import atomic_path
from ncd_serve.gallery.thumbnails import COLUMNS, draw_sheet
from ncd_serve.inputs.images import is_image
from ncd_serve.places import find_runs, newest_generation, started
from ncd_serve.preprocess import open_image
from ncd_serve.studio.commands import Training, TrainingForm, changes_since, run_command
from ncd_serve.studio.project import Project
from ncd_serve.studio.rounds import again, changes, kept_images, next_round, next_run, waiting
from ncd_serve.studio.serving import serving_state, start_serving, stop_serving
from ncd_serve.text import check_name, printable

if TYPE_CHECKING:
    from ncd_serve.naming import Names
    from ncd_serve.progress import Progress

_FORMING_TILE = 64  # px
_NO_PROJECT = "train a model first, or open a run"


@dataclass
class Desk:
    """State of a studio. Its methods are called from several threads."""

    address: str
    token: str
    progress: Progress
    opened: Project | None = None
    folder: Path | None = None  # of images, to begin with
    training: Training | None = None  # that goes on, has ended, or could be resumed
    _before: Project | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def project(self) -> Project:
        """The open project."""
        if self.opened is None:
            raise UsageError("no run is open", hint=_NO_PROJECT)
        return self.opened

    def project_of(self, key: str) -> Project:
        """Return the project that pictures are of: the open one, or the one before, whose page may still be shown."""
        for project in (self.opened, self._before):
            if project is not None and project.key == key:
                return project
        raise DataError("these pictures are of a run that is not open any more", hint="load the page again")

    def open(self, source: Path) -> None:
        """Show another run or bundle; one that was trained again is exported, which gives its clusters their names."""
        project = Project(newest_of(source, self.progress), progress=self.progress)
        with self._lock:
            if project.bundle is None and changes_since(source):
                run_command("export", str(source))
            self._before, self.opened = self.opened, project

    def runs(self) -> list[dict[str, Any]]:
        """Return the finished runs in this folder or below it, the latest first."""
        shown = self.opened.source.resolve() if self.opened else Path()
        return [
            {"run": str(run), "started": started(run)[:10], "open": shown.is_relative_to(run.resolve())}
            for run in find_runs()
        ]

    def page_data(self) -> dict[str, Any]:
        """Return the data of the page; without a project, that of an empty one."""
        facts = self.opened.page_data() if self.opened else _empty()
        shared = {"folder": str(self.folder or ""), "address": self.address, "token": self.token}
        key = self.opened.key if self.opened else ""
        return facts | {"studio": f"/p/{key}", "exported": bool(self.opened and self.opened.bundle), "live": shared}

    def export(self) -> None:
        """Export the open run, unless it was exported before."""
        with self._lock:
            self._export()

    def _export(self) -> None:
        if self.project.bundle is None:
            run_command("export", str(self.project.source))

    def apply(self, names: Names) -> dict[str, Any]:
        """Apply names; a run that was never exported is exported first."""
        with self._lock:
            self._export()
            return self.project.apply(names)

    def keep_image(self, content: bytes, category: str, name: str) -> str:
        """Keep a new image as an example of a category, in a folder that training reads as labelled images."""
        try:
            folder = check_name(category.strip())
        except ValueError as error:
            raise DataError(str(error), hint="give the category a name") from None
        plain = re.sub(r"[^\w.()-]+", "_", Path(name).name)
        if "/" in folder or folder.startswith(".") or not is_image(Path(plain)):
            raise DataError(f"'{category}' / '{name}' cannot be a folder and an image", hint="choose another name")
        if self.project.bundle and folder in Bundle.read(self.project.bundle).manifest.cluster_names:
            raise DataError(f"a cluster is called '{folder}' already", hint="a new category needs another name")
        open_image(content)  # DataError if it is none
        target = _place_for(content, self.project.new_categories / folder / plain)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary:
            temporary.write_bytes(content)
        return str(target)

    def forget_category(self, category: str) -> None:
        """Remove the images of a category that were kept; they are copies."""
        if category not in kept_images(folder := self.project.new_categories):
            raise DataError(f"no category '{printable(category)}' is kept", hint="load the page again")
        if (run := next_run(self._bundle())).exists():
            raise UsageError(f"{run} learns from these images", hint="open it, in the tab Training")
        shutil.rmtree(folder / category)

    def waiting(self) -> dict[str, Any]:
        """Return the categories that wait for the next round."""
        if self.opened is None or self.opened.bundle is None:
            return {"kept": {}, "ready": {}, "too_small": []}
        return waiting(Bundle.read(self.opened.bundle), self.opened.new_categories)

    def next_round(self) -> dict[str, Any]:
        """Make clusters of the waiting categories, open the next generation, and return what changed."""
        with self._lock:
            before = self._bundle()
            folder = next_round(before, self.project.new_categories, progress=self.progress)
            self._before, self.opened = self.opened, Project(folder, progress=self.progress)
        after = Bundle.read(folder)
        added = len(after.manifest.cluster_names) - len(before.manifest.cluster_names)
        facts = {"bundle": str(folder), "generation": after.manifest.generation, "added": added}
        return facts | {"changes": changes(after)}

    def plan(self, form: TrainingForm) -> str:
        """Return what `train --dry-run` says."""
        return run_command("train", *form.arguments(), "--dry-run")

    def train(self, form: TrainingForm) -> None:
        """Start a training, one at a time."""
        with self._lock:
            self._check_idle()
            self.training = Training.start(form)

    def train_again(self) -> None:
        """Start a training that learns what was said about images, and keeps ids and names."""
        with self._lock:
            self._check_idle()
            if (run := next_run(bundle := self._bundle())).exists():
                raise UsageError(f"{run} exists", hint="open it, in the tab Training")
            self.training = Training.launch(run, again(bundle, self.project.new_categories))

    def resume(self, run: Path) -> None:
        """Continue an interrupted training."""
        with self._lock:
            self._check_idle()
            self.training = Training.resume(run)

    def offer_to_resume(self, run: Path) -> None:
        """Show a training that was begun before this studio, and is not finished."""
        self.training = Training(run)
        self.progress.say(f"{run} is not finished: the tab Training shows it")

    def stop_training(self) -> None:
        """Interrupt the training; it can be resumed."""
        if self.training:
            self.training.stop()

    def training_state(self) -> dict[str, Any]:
        """Return the state of the training, if there is one."""
        return self.training.state() if self.training else {"state": "none"}

    def forming_sheet(self) -> bytes:
        """Return pictures of the clusters as they form, a row for each."""
        forming = self.training_state().get("forming") or {"clusters": []}
        rows = [[*map(Path, cluster["examples"][:COLUMNS])] for cluster in forming["clusters"]]
        files = [file for row in rows for file in row + [Path()] * (COLUMNS - len(row))]
        return draw_sheet(range(len(files)), files=files, size=_FORMING_TILE)[0]

    def serving_state(self) -> dict[str, Any]:
        """Return the state of the project's server."""
        if self.opened is None:
            return {"running": False, "obstacle": f"No run is open: {_NO_PROJECT}."}
        return serving_state(self.opened.place, exported=self.opened.bundle is not None)

    def start_serving(self) -> None:
        """Start a Triton server on the project's repository, unless one runs; export the model first if need be."""
        with self._lock:
            self._export()
            if not self.serving_state()["running"]:
                start_serving(self.project.place)

    def stop_serving(self) -> None:
        """Stop that server."""
        stop_serving(self.project.place)

    def close(self) -> None:
        """End what would be lost without the studio: a training writes its checkpoint."""
        with suppress(OSError):
            self.stop_training()

    def _bundle(self) -> Bundle:
        """Return the bundle of the open project."""
        if self.project.bundle is None:
            raise DataError("the model was not exported yet", hint="apply a change first")
        return Bundle.read(self.project.bundle)

    def _check_idle(self) -> None:
        if self.training and self.training.going:
            raise UsageError(f"{self.training.run} is being trained", hint="stop it first")


def newest_of(source: Path, progress: Progress) -> Path:
    """Return the newest generation of a run, once there are several; else what was given."""
    newest = newest_generation(source / "bundle")
    if newest == source / "bundle":
        return source
    progress.say(f"its newest generation: {newest}")
    return newest


def _place_for(content: bytes, wanted: Path) -> Path:
    """Return the path that is wanted for a file, or a numbered one if another file has it: cameras count anew."""
    numbered = (wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}") for number in count(2))
    return next(path for path in chain([wanted], numbered) if not path.exists() or path.read_bytes() == content)


def _empty() -> dict[str, Any]:
    """Return the data of a page without clusters."""
    lists = ("defaults", "junk", "corrected", "sheets", "missing", "fits", "clusters", "questions", "failures")
    more = ("left_out", "verdict", "alike")
    columns = ("path", "confidence", "central", "classes")
    return {
        **{name: [] for name in (*lists, *more)},
        **{name: {} for name in ("names", "merged", "new_names")},
        **dict.fromkeys(("bundle", "checkpoint", "root", "confusion", "tight")),
        **dict.fromkeys(("total", "fixed", "failed"), 0),
        "title": "studio",
        "kind": "run",
        "source": "",
        "version": __version__,
        "map": "none",
        "embedded": False,
        "columns": COLUMNS,
        "background": [[], []],
        "images": {**{name: [] for name in columns}, "fit": None, "truth": None, "x": None, "y": None},
    }
