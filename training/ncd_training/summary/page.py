"""Report page of a run, report.html: one file that needs no network and no script."""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from ncd_serve.files import write_text
from ncd_serve.gallery.clusters import describe_clusters
from ncd_serve.gallery.read import read_run
from ncd_serve.gallery.thumbnails import COLUMNS, draw_sheet
from ncd_serve.reference import Reference
from ncd_training.base.run_dir import Score, Summary
from ncd_training.config.schema import MethodConfig, TrainConfig
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN
from ncd_training.objective.method import method_named
from ncd_training.score.metrics import cluster_balance
from ncd_training.summary.figures import (
    BALANCE,
    PAIR_COLUMNS,
    PAIRS,
    QUALITY,
    TERMS,
    WORST_CLASSES,
    EpochRow,
    ScoreRow,
    curves,
    initial_weights,
    score_rows,
    split_uses,
    stages_before,
    worst_first,
)
from ncd_training.summary.live import duration
from ncd_training.summary.plots import Chart, chart

if TYPE_CHECKING:
    from ncd_training.base.run_dir import RunDir
    from ncd_training.data.prepare import Setup

_MEANINGS = {
    UNLABELLED_TRAIN: "transductive: the clustered images themselves, seen in training without labels",
    NOVEL_TEST: "held out: images of the novel classes that training never saw",
    KNOWN_TEST: "held out: images of the known classes that training never saw",
    "all-test": "held out: novel-test and known-test together",
}
# Settings that the plan shows in words.
_PLAN_SETTINGS = {"dataset", "root", "labelled", "unlabelled", "manifest", "novel_classes", "weights"}
_SNAPSHOT = re.compile(r"tsne-(?:init|epoch-(\d+))\.png")
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  ((?:epoch (\d+)/)?.*)", re.MULTILINE)
_RESUMED, _ENDED = "resuming ", "ended by "  # begin the first line of a resumed session, and the last one of any
_FILES = ("config.toml", "summary.json", "metrics.jsonl", "environment.json", "log.txt", "skipped.txt", "estimate.json")
_STRIP_TILE, _MAX_STRIPS = 64, 30  # px of the pictures that the page opens with, and clusters that have some
_MAX_FILE_LINES = 1000  # skipped images that the page lists: a browser must be able to open it


class Tile(NamedTuple):
    """Headline figure at the top of the page."""

    value: str
    label: str
    note: str


class Setting(NamedTuple):
    """Setting that differs from its default; both values as `config show` writes them."""

    key: str
    value: str
    default: str


class EmbeddedImage(NamedTuple):
    """Image in the page, as a data URL."""

    caption: str
    file: str
    address: str


class FoundCluster(NamedTuple):
    """Cluster as the page opens with it: its size, and its most central images as a data URL."""

    name: str
    images: int
    confidence: float
    doubtful: int  # images that are unusual for it, or outliers
    strip: str


class LogLine(NamedTuple):
    """Line of log.txt."""

    when: datetime
    epoch: int  # the finished epoch; 0 in other lines


class Charts(NamedTuple):
    """Charts of figures over the epochs; None for those without figures."""

    scores: Chart | None
    balance: Chart | None
    pairs: Chart | None
    terms: dict[str, Chart]


def found_clusters(run: Path) -> list[FoundCluster]:
    """Return the largest clusters of a finished run, with pictures; images that are gone are grey."""
    shown = read_run(run)
    described, _ = describe_clusters(shown)
    return [
        FoundCluster(
            shown.naming.labels[cluster.number],
            cluster.count,
            cluster.confidence,
            sum(cluster.fits[1:]) if cluster.fits else 0,
            _strip([shown.files[row] for row in cluster.images[:COLUMNS]]),
        )
        for cluster in described[:_MAX_STRIPS]
    ]


def _strip(files: list[Path]) -> str:
    content, _ = draw_sheet(range(len(files)), files=files, size=_STRIP_TILE, columns=len(files))
    return "data:image/jpeg;base64," + b64encode(content).decode()


def write_report(setup: Setup, run: RunDir, *, epoch: int, scored: bool) -> None:
    """Write the page of a run after `epoch` epochs; `scored`: the scores in its summary are of that state."""
    write_text(run.report, render_report(setup, run, epoch=epoch, scored=scored))


def render_report(setup: Setup, run: RunDir, *, epoch: int, scored: bool) -> str:
    """Return the page as HTML. Figures that are not known are stated to be missing."""
    rows, summary = run.read_metrics()[:epoch], run.read_summary()
    if not scored:  # scores in the summary may belong to an earlier state
        summary = summary.model_copy(update={"scores": {}, "pseudo_labels": {}, "verdict": None})
    reference = Reference.read(run.reference) if scored and run.reference.exists() else None
    sizes = reference.counts.tolist() if reference else []
    facts = json.loads(run.environment.read_text()) if run.environment.exists() else {}
    findings = _lines(run.skipped)
    return template("report.html.jinja").render(
        manifest=setup.manifest,
        clusters=setup.clusters,
        config=setup.config,
        method=method_named(setup.config.method.name).title,
        done=len(rows),
        scored=scored,
        run=run.path.absolute(),
        tiles=tiles(summary, rows, reference),
        found=found_clusters(run.path) if reference else [],
        verdict=summary.verdict,
        sentences=read_run(run.path).verdict if reference and summary.verdict else [],
        splits=split_uses(setup.manifest),
        stages=stages_before(setup.config),
        weights=initial_weights(setup.config, summary),
        estimate=json.loads(run.estimate.read_text()) if run.estimate.exists() else None,
        settings=changed_settings(setup.config),
        scores=scores_by_split(summary),
        baselines=summary.baselines,
        charts=charts(rows, summary.baselines),
        pairs=summary.pseudo_labels,
        sizes=sorted(enumerate(sizes), key=lambda item: -item[1]),
        balance=balance(sizes) if sizes else None,
        classes={split: worst_first(score) for split, score in summary.scores.items() if score.classes},
        pictures=pictures(run.plots),
        skipped=[line for line in findings if line.startswith("skipped ")],
        kept=[line for line in findings if not line.startswith("skipped ")],
        facts=facts,
        command=command_line(facts.get("command", [])),
        times=times("\n".join(_lines(run.log))),
        written=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        files=[name for name in _FILES if (run.path / name).exists()],
    )


def tiles(summary: Summary, rows: Sequence[EpochRow], reference: Reference | None) -> list[Tile]:
    """Return the headline figures that are known."""
    scores, last = summary.scores, next((row for row in reversed(rows) if BALANCE in row), {})
    found, when = [], f"after epoch {last.get('epoch')}"
    if UNLABELLED_TRAIN in scores:
        to_beat = [score.acc for score in summary.baselines.values()]
        note = f"transductive; k-means reaches {max(to_beat):.3f}" if to_beat else "transductive"
        found.append(Tile(f"{scores[UNLABELLED_TRAIN].acc:.3f}", f"ACC, {UNLABELLED_TRAIN}", note))
    elif "acc" in last:
        found.append(Tile(f"{last['acc']:.3f}", f"ACC, {UNLABELLED_TRAIN}", f"transductive; {when}"))
    for split, note in ((NOVEL_TEST, "held out; discovered classes"), (KNOWN_TEST, "held out; known classes")):
        if split in scores:
            found.append(Tile(f"{scores[split].acc:.3f}", f"ACC, {split}", note))
    if reference:
        sizes = reference.counts.tolist()
        note = f"1 is even; {min(sizes):,} to {max(sizes):,} images in a cluster"
        found.append(Tile(f"{balance(sizes):.3f}", "cluster balance", note))
        found.append(
            Tile(f"{reference.confidences.mean():.3f}", "mean confidence", f"of its cluster, {UNLABELLED_TRAIN}")
        )
    elif last:
        found.append(Tile(f"{last[BALANCE]:.3f}", "cluster balance", f"1 is even; {when}"))
    return found


def balance(sizes: Sequence[int]) -> float:
    """Return the cluster balance of clusters of these sizes."""
    return cluster_balance(np.repeat(np.arange(len(sizes)), sizes), len(sizes))


def changed_settings(config: TrainConfig) -> list[Setting]:
    """Return the settings that differ from the defaults, without those that the plan shows in words."""
    own = method_named(config.method.name).Settings().model_dump()
    defaults = TrainConfig(method=MethodConfig(**own)).model_dump(mode="json")
    return [
        Setting(f"{section}.{key}", _as_text(value), _as_text(defaults[section][key]))
        for section, values in config.model_dump(mode="json").items()
        for key, value in values.items()
        if key not in _PLAN_SETTINGS and value != defaults[section][key]
    ]


def scores_by_split(summary: Summary) -> dict[str, list[ScoreRow]]:
    """Return baselines and scores, grouped by split."""
    found: dict[str, list[ScoreRow]] = {}
    for row in score_rows(summary):
        found.setdefault(row.split, []).append(row)
    return found


def charts(rows: Sequence[EpochRow], baselines: Mapping[str, Score]) -> Charts:
    """Return the charts of all figures so far."""
    quality, pairs = curves(rows, QUALITY), curves(rows, PAIRS)
    scores = [curve for curve in quality if curve.name != "balance"]
    even = [curve._replace(colour=0) for curve in quality if curve.name == "balance"]
    levels = {name: score.acc for name, score in baselines.items()}
    return Charts(
        scores=chart(scores, top=1.0, levels=levels) if scores else None,
        balance=chart(even, top=1.0) if even else None,
        pairs=chart(pairs, top=1.0) if pairs else None,
        terms={curve.name: chart([curve._replace(colour=0)]) for curve in curves(rows, TERMS)},
    )


def pictures(folder: Path) -> list[EmbeddedImage]:
    """Return the t-SNE pictures of the embeddings, the earliest first."""
    names = {file.name: _SNAPSHOT.fullmatch(file.name) for file in folder.glob("tsne-*")}
    found = {int(match[1] or 0): folder / name for name, match in names.items() if match}
    return [
        EmbeddedImage(
            f"after epoch {epoch}" if epoch else "before discovery",
            found[epoch].name,
            "data:image/png;base64," + b64encode(found[epoch].read_bytes()).decode(),
        )
        for epoch in sorted(found)
    ]


def command_line(words: Sequence[str]) -> str:
    """Return the command of the run, quoted for a shell."""
    if words and Path(words[0]).name == "__main__.py":
        words = ["python", "-m", Path(words[0]).parent.name, *words[1:]]
    return shlex.join(words)


def times(log: str) -> dict[str, str]:
    """Return start, end of the last epoch, training time without pauses and median time of an epoch, from the log."""
    sessions = _sessions(log)
    if not sessions:
        return {}
    found = {"started": f"{sessions[0][0].when}"}
    ends = [[line.when for line in session if line.epoch] for session in sessions]
    trained = [number for number, whens in enumerate(ends) if whens]
    if trained:
        last = ends[trained[-1]][-1]
        spans = [(session[0].when, session[-1].when) for session in sessions[: trained[-1]]]
        spans.append((sessions[trained[-1]][0].when, last))
        seconds = sum((end - start).total_seconds() for start, end in spans)
        found |= {"last epoch ended": f"{last}", "duration": duration(seconds)}
    steps = [(later - earlier).total_seconds() for whens in ends for earlier, later in pairwise(whens)]
    return {**found, "an epoch": f"{duration(median(steps))} (median)"} if steps else found


def _sessions(log: str) -> list[list[LogLine]]:
    """Return the lines of the log by session: a resumed run has several sessions, with pauses between them."""
    sessions: list[list[LogLine]] = []
    ended = True
    for when, text, epoch in _LOG_LINE.findall(log):
        if ended or text.startswith(_RESUMED):
            sessions.append([])
        sessions[-1].append(LogLine(datetime.fromisoformat(when), int(epoch or 0)))
        ended = text.startswith(_ENDED)
    return sessions


def _as_text(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def template(name: str) -> Any:
    """Return a template of a page by its file name."""
    environment = Environment(
        loader=PackageLoader("ncd_training.summary"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "meanings": _MEANINGS,
        "most_lines": _MAX_FILE_LINES,
        "pair_columns": PAIR_COLUMNS,
        "quote": shlex.quote,
        "worst": WORST_CLASSES,
    }
    return environment.get_template(name)
