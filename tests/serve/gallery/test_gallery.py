from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncd_serve.errors import DataError, UsageError
from ncd_serve.gallery import Collection, MapKind, build_gallery, read_source
from ncd_serve.gallery.clusters import describe_clusters
from ncd_serve.gallery.collection import GivenNames
from ncd_serve.gallery.confusion import confusion_data, contingency
from ncd_serve.gallery.projection import places, principal
from ncd_serve.gallery.questions import find_questions
from ncd_serve.prediction import Candidate, Prediction
from ncd_serve.reference import REFERENCE, Reference
from ncd_serve.rows.tables import write_rows
from tests.contract.test_no_torch import heavy_imports
from tests.serve.small_gallery import CHECKPOINT, HOSTILE_CLASS, KNOWN, SCRIPT, make_bundle, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def data_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def row(path: object, cluster: int, confidence: float, second: int = 0, **rest: Any) -> Prediction:
    top = [Candidate(cluster, f"cluster-{cluster}", confidence), Candidate(second, f"cluster-{second}", 0.1)]
    return Prediction(str(path), "ok", *top[0][:2], confidence, 0.1, top_k=top, **rest)


def test_facts_worked_by_hand() -> None:
    # Cluster 0: directions (1, 0), (0.8, 0.6), (1, 0); their sum (2.8, 0.6) has length sqrt(8.2). Cluster 1: (0, 1).
    shown = Collection(
        kind="run",
        source=Path("run"),
        naming=GivenNames(["cluster-0", "cluster-1"]),
        root=Path(),
        paths=["a", "b", "c", "d"],
        files=[],
        cluster_ids=np.array([0, 0, 0, 1]),
        confidences=np.array([0.9, 0.6, 0.3, 1.0], np.float32),
        counts=np.array([6, 1]),
        fits=np.array([0, 2, 1, 0]),
        embeddings=np.array([[2, 0], [0.8, 0.6], [1, 0], [0, 3]], np.float32),
        known_ids={0: np.array([1, 1, 0])},
        known_classes=["gull", "tern"],
        truth=["auk", "auk", "owl", "owl"],
    )
    (large, small), central = describe_clusters(shown)
    length = 8.2**0.5
    assert central == pytest.approx([2.8 / length, (0.8 * 2.8 + 0.36) / length, 2.8 / length, 1], abs=1e-6)
    assert (large.number, large.count, large.confidence) == (0, 6, pytest.approx(0.6))
    assert large.images == [0, 2, 1] and large.introduced == (3, 0)
    assert large.nearest == [(1, pytest.approx(0.6 / length))]
    assert large.known == ("tern", pytest.approx(2 / 3))
    assert large.truths == [("auk", 2), ("owl", 1)] and large.purity == pytest.approx(2 / 3)
    assert large.fits == [1, 1, 1]
    assert (small.count, small.known, small.purity) == (1, None, 1)


def test_the_least_certain_images_follow_the_most_central_ones() -> None:
    shown = Collection(
        kind="rows",
        source=Path("rows.csv"),
        naming=GivenNames(["cluster-0"]),
        root=Path(),
        paths=[str(number) for number in range(40)],
        files=[],
        cluster_ids=np.zeros(40, np.int64),
        confidences=np.arange(40, dtype=np.float32) / 40,
        counts=np.array([40]),
        rivals=np.array([1] * 30 + [2] * 5 + [-1] * 5),
    )
    (cluster,), central = describe_clusters(shown)
    assert central is shown.confidences  # without embeddings
    assert cluster.images == [*range(39, 23, -1), *range(6), *range(23, 5, -1)]
    assert cluster.introduced == (16, 6)
    assert cluster.nearest == [(1, 30 / 40), (2, 5 / 40)]


def test_contingency() -> None:
    classes, table = contingency(np.array([0, 0, 2]), ["b", "a", "b"], clusters=3)
    assert classes == ["a", "b"] and table.tolist() == [[1, 1], [0, 0], [0, 1]]


def test_principal_axes_worked_by_hand() -> None:
    # Along (3, 4) / 5 they are at -5, 0 and 5; across it nowhere.
    found = principal(np.array([[-3, -4], [0, 0], [3, 4]], np.float32), 2)
    assert found == pytest.approx(np.array([[-5, 0], [0, 0], [5, 0]]), abs=1e-5)
    assert principal(np.array([[1.0], [3.0]], np.float32), 2).tolist() == [[-1, 0], [1, 0]]


@pytest.mark.parametrize("kind", [MapKind.PCA, MapKind.TSNE])
def test_places_keep_clusters_apart(kind: MapKind) -> None:
    rng = np.random.default_rng(0)
    vectors = np.repeat(np.eye(3, 8), 10, axis=0) + rng.normal(0, 0.02, (30, 8))
    found = places(vectors.astype(np.float32), kind)
    assert found.min() >= 0 and found.max() <= 1
    distances = np.linalg.norm(found[:, None] - found[None], axis=2)
    same = np.kron(np.eye(3), np.ones((10, 10))).astype(bool)
    assert distances[same].max() < distances[~same].min()


def test_a_page_of_a_run(run: Path, tmp_path: Path) -> None:
    made = build_gallery(read_source(run), tmp_path / "page.html", kind=MapKind.PCA)
    assert (made.images, made.clusters, made.missing) == (24, 3, 1)
    data = data_of(made.path)
    assert [cluster["id"] for cluster in data["clusters"]] == [1, 0, 2]
    assert [cluster["purity"] for cluster in data["clusters"]] == [1, 0.75, 1]
    assert data["clusters"][0]["known"] == ["gull", 1]
    assert data["images"]["path"][data["missing"][0]] == "blue/blue-03.png"
    # 12 terns, 6 auks and 4 owls are in the clusters that match them; 2 terns are not.
    assert data["confusion"]["accuracy"] == pytest.approx(22 / 24, abs=1e-4)
    assert (data["confusion"]["clusters"], data["confusion"]["classes"]) == ([1, 0, 2], ["tern", "auk", HOSTILE_CLASS])
    assert data["confusion"]["cells"] == [[0, 0, 12], [1, 0, 2], [1, 1, 6], [2, 2, 4]]


def test_confusion_without_a_stored_matching_has_no_accuracy(run: Path) -> None:
    shown = replace(read_source(run), matched=[])
    table = confusion_data(shown, [1, 0, 2])
    assert table is not None and (table["accuracy"], table["matched"]) == (None, 0)
    # Clusters by size, each class at its largest cluster.
    assert (table["clusters"], table["classes"]) == ([1, 0, 2], ["tern", "auk", HOSTILE_CLASS])
    assert table["cells"] == [[0, 0, 12], [1, 0, 2], [1, 1, 6], [2, 2, 4]]


def test_what_is_not_matched_comes_last(run: Path) -> None:
    shown = replace(read_source(run), matched=["tern", "", HOSTILE_CLASS, "auk"])
    table = confusion_data(shown, [1, 0, 2])
    assert table is not None and (table["clusters"], table["matched"]) == ([0, 2, 1], 2)
    assert table["classes"] == ["tern", HOSTILE_CLASS, "auk"] and table["accuracy"] == pytest.approx(6 / 24)


def test_sheets_hold_the_pictures_in_order(run: Path, tmp_path: Path) -> None:
    page = build_gallery(read_source(run), tmp_path / "page.html", kind=MapKind.NONE).path
    sheets = re.findall(r'id="sheet-(\d+)">([^<]+)<', page.read_text())
    assert [number for number, _ in sheets] == ["0", "1", "2"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(text))) for _, text in sheets]
    assert [picture.size for picture in pictures] == [(1280, 256), (1280, 128), (1280, 128)]
    data = data_of(page)
    assert data["sheets"] == [0, 12, 20, 24] and data["images"]["x"] is None
    missing = data["missing"][0] - 20
    red, _, blue = (picture.getpixel((64, 64)) for picture in pictures)
    grey = pictures[2].getpixel((64 + 128 * missing, 64))
    assert red[0] > 150 > red[2] and blue[2] > 150 > blue[0] and max(grey) - min(grey) < 8


def test_everything_is_escaped_and_the_policy_knows_the_script(run: Path, tmp_path: Path) -> None:
    hostile = '"><img src=x onerror=alert(1)>'
    shown = read_source(run)
    shown = replace(shown, naming=replace(shown.naming, names={1: hostile}))
    page = build_gallery(shown, tmp_path / "page.html", title=f"{hostile}</title>", kind=MapKind.PCA).path.read_text()
    assert page.count("<img") == 0 and "alert(1)</script>" not in page and HOSTILE_CLASS not in page
    assert page.count("<script") == page.count("</script") == 2 + 3
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert not re.search(r'(?:src|href)="(?!#|data:,)', page) and "@import" not in page
    data = data_of(tmp_path / "page.html")
    assert data["names"] == {"1": hostile} and SCRIPT in data["images"]["path"]


def test_images_that_were_moved(run: Path, tmp_path: Path) -> None:
    moved = make_run(tmp_path / "moved")
    (moved / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="none of the images") as caught:
        read_source(moved)
    assert caught.value.hint and "--images" in caught.value.hint
    shown = read_source(moved, images=tmp_path / "elsewhere")
    assert sum(file.is_file() for file in shown.files) == 23


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_without_a_bundle(run: Path, tmp_path: Path, suffix: str) -> None:
    rows = [
        row(run / "images" / "green" / "green-00.png", 2, 0.9, fit="typical"),
        row(run / "images" / "green" / "green-01.png", 2, 0.5, 1, fit="outlier"),
        Prediction.failed("broken.png", "not an image"),
    ]
    write_rows(rows, tmp_path / f"rows.{suffix}")
    shown = read_source(tmp_path / f"rows.{suffix}")
    assert (shown.kind, shown.paths, shown.total) == ("rows", ["green-00.png", "green-01.png"], 2)
    assert shown.naming.defaults == ["cluster-0", "cluster-1", "cluster-2"] and shown.embeddings is None
    assert shown.fits is not None and shown.fits.tolist() == [0, 2]
    assert shown.rivals is not None and shown.rivals.tolist() == [0, 1]
    assert shown.failures == [("broken.png", "not an image")]
    data = data_of(build_gallery(shown, tmp_path / "page.html").path)
    assert (data["map"], data["checkpoint"], data["bundle"], data["failed"]) == ("none", None, None, 1)


def test_rows_of_images_elsewhere(run: Path, tmp_path: Path) -> None:
    write_rows([row("/gone/green-00.png", 0, 0.9), row("/gone/green-01.png", 0, 0.9)], tmp_path / "rows.csv")
    shown = read_source(tmp_path / "rows.csv", images=run / "images" / "green")
    assert all(file.is_file() for file in shown.files) and shown.fits is None


def test_more_rows_than_are_shown(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncd_serve.gallery.read.MAX_IMAGES", 4)
    write_rows([row(run / "images" / "green" / f"green-{i:02d}.png", 0, 0.9) for i in range(8)], tmp_path / "rows.csv")
    shown = read_source(tmp_path / "rows.csv")
    assert (len(shown.paths), shown.total) == (4, 8)


def test_what_is_no_source(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_source(tmp_path / "nothing")
    with pytest.raises(UsageError, match="--bundle is only for rows"):
        read_source(run, bundle=run)
    with pytest.raises(DataError, match="has no reference"):
        read_source(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        read_source(text)
    for name in ("rows.csv", "rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_text("hello,world\n1,2\n")
        with pytest.raises(DataError, match="not a table of rows"):
            read_source(tmp_path / name)
    write_rows([Prediction.failed("a.png", "broken")], tmp_path / "all-failed.csv")
    with pytest.raises(DataError, match="no image with a cluster"):
        read_source(tmp_path / "all-failed.csv")


def test_names_of_a_bundle(run: Path, tmp_path: Path) -> None:
    said = {"cluster_names": ["heron", "heron", "junk", "cluster-3"], "merged": {1: 0}, "junk": [2]}
    shown = read_source(make_bundle(run, tmp_path / "bundle", **said))
    naming = shown.naming
    assert (shown.kind, naming.names, naming.merged, naming.junk) == ("bundle", {0: "heron"}, {1: 0}, [2])
    assert naming.defaults == [f"cluster-{number}" for number in range(4)]
    assert (naming.checkpoint, naming.bundle) == (CHECKPOINT, tmp_path / "bundle")


def test_names_of_a_bundle_that_tells_known_classes_too(run: Path, tmp_path: Path) -> None:
    names = [*KNOWN, "cluster-0", "heron"]
    naming = read_source(make_bundle(run, tmp_path / "bundle", cluster_names=names, open_world=True)).naming
    assert (naming.fixed, naming.defaults, naming.names) == (2, [*KNOWN, "cluster-0", "cluster-1"], {3: "heron"})


def test_known_classes_of_an_open_world_keep_their_names(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    found = Reference.read(folder / REFERENCE)
    replace(found, known_clusters=len(found.known_classes)).write(folder / REFERENCE)
    naming = read_source(folder).naming
    assert naming.fixed == 2 and naming.defaults == [*found.known_classes, "cluster-0", "cluster-1"]


def test_names_of_the_bundle_in_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = ["cluster-0", "gull", "cluster-2", "cluster-3"]
    bundle = make_bundle(run, run / "bundle", cluster_names=names)
    assert read_source(run).naming.names == {1: "gull"}
    shutil.rmtree(bundle)
    assert read_source(run).naming.names == {}


def test_no_heavy_package_is_needed(run: Path, tmp_path: Path) -> None:
    assert heavy_imports("gallery", run, "--map", "pca", "--out", tmp_path / "page.html") == ""
    assert (tmp_path / "page.html").is_file()


def test_where_no_page_can_be_written(run: Path, tmp_path: Path, ncd: Any) -> None:
    done = ncd("gallery", run, "--out", tmp_path)
    assert done.returncode == 2 and "is a folder" in done.stderr
    with pytest.raises(DataError, match="cannot write"):
        build_gallery(read_source(run), run / "reference.npz" / "page.html", kind=MapKind.NONE)


def test_a_bundle_its_names_and_rows_of_it(bundle: Path, glyphs: Path, tmp_path: Path, ncd: Any) -> None:
    done = ncd("gallery", bundle, "--out", tmp_path / "bundle.html", "--map", "pca")
    assert done.returncode == 0, done.stderr
    data = data_of(tmp_path / "bundle.html")
    assert data["bundle"] == str(bundle.resolve()) and len(data["checkpoint"]) == 12 and data["kind"] == "bundle"
    assert data["defaults"] == [f"cluster-{number}" for number in range(5)] and data["names"] == {}
    ncd("assign", glyphs / "test" / "A", glyphs / "test" / "E", "--bundle", bundle, "--out", tmp_path / "rows.csv")
    done = ncd("gallery", tmp_path / "rows.csv", "--bundle", bundle)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "rows.csv.gallery.html"
    data = data_of(tmp_path / "rows.csv.gallery.html")
    assert (data["total"], data["embedded"], data["map"]) == (4, True, "tsne")
    assert any(cluster["known"] for cluster in data["clusters"])
    assert len(data["background"][0]) == 20  # the unlabelled images of training


def test_the_accuracy_is_that_of_the_run(tiny_run: Path) -> None:
    shown = read_source(tiny_run)
    table = confusion_data(shown, list(range(len(shown.counts))))
    scores = json.loads((tiny_run / "summary.json").read_text())["scores"]
    assert table is not None and table["accuracy"] == pytest.approx(scores["unlabelled-train"]["acc"], abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_map_of_images_that_are_all_the_same_does_not_crash(value: float) -> None:
    for width in (1, 8):
        where = places(np.full((20, width), value, np.float32), MapKind.TSNE)
        assert where.shape == (20, 2) and np.isfinite(where).all()


def test_questions_are_about_images_between_two_clusters() -> None:
    # Ten images near 0 and ten near 90 degrees; one in ten is doubtful: those at 40 and 44, of the first cluster.
    degrees = np.radians([*range(0, 8), 40, 44, *range(83, 93)])
    embeddings = np.stack([np.cos(degrees), np.sin(degrees)], 1).astype(np.float32)
    ids = np.array([0] * 10 + [1] * 10)
    paths = [f"{number}.png" for number in range(20)]
    shown = Collection(
        kind="run",
        source=Path("run"),
        naming=GivenNames(["cluster-0", "cluster-1"]),
        root=Path(),
        paths=paths,
        files=[Path(path) for path in paths],
        cluster_ids=ids,
        confidences=np.ones(20, np.float32),
        counts=np.array([10, 10]),
        embeddings=embeddings,
    )
    order = list(range(19, -1, -1))
    (question,) = find_questions(shown, order)
    assert {question["image"], *question["like"]} == {order.index(8), order.index(9)} and question["other"] == 1
    assert find_questions(replace(shown, kind="rows"), order) == []
    assert find_questions(replace(shown, cluster_ids=np.zeros(20, np.int64)), order) == []


def test_a_run_without_known_classes_is_shown(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    found = Reference.read(run / REFERENCE)
    replace(found, known_classes=[], known_ids=np.zeros_like(found.known_ids)).write(folder / REFERENCE)
    data = data_of(build_gallery(read_source(folder), tmp_path / "page.html", kind=MapKind.NONE).path)
    assert [cluster["known"] for cluster in data["clusters"]] == [None] * 3
    assert data["verdict"] == [], "a run of an older version has none"


def test_a_verdict_is_shown_with_names(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    verdict = {"images": 24, "clusters": 3, "expected": 0.81, "silhouette": 0.1, "agreement": 0.9, "alike": [[0, 7]]}
    (folder / "summary.json").write_text(json.dumps({"verdict": verdict}))
    data = data_of(build_gallery(read_source(folder), tmp_path / "page.html", kind=MapKind.NONE).path)
    assert data["verdict"][0] == "expect about 8 of 10 images in the right cluster"
    assert data["verdict"][2] == "cluster-0 and cluster 7 look like one", "an id that the run does not have is a number"
