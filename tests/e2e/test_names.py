"""Names from a names.json to the answers of a real Triton, and back; and what `ncd-serve name` refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.inputs.images import find_images
from ncd_serve.preprocess import load_array
from ncd_serve.triton import TritonServer
from tests.contract.test_exit_codes import assert_kind
from tests.export.folders import unchanged


@pytest.fixture
def place(bundle: Path, repository: Path, tmp_path: Path) -> Path:
    """A folder with a bundle and a repository of its own, as a user has it."""
    shutil.copytree(bundle, tmp_path / "bundle")
    shutil.copytree(repository, tmp_path / "model_repository")
    return tmp_path


def write_names(place: Path, clusters: dict[int, Any], **facts: Any) -> Path:
    target = place / "names.json"
    target.write_text(json.dumps({"bundle": str(place / "bundle"), "clusters": clusters, **facts}))
    return target


def queried(server: TritonServer, images: Path, ncd: Any, target: Path) -> list[dict[str, Any]]:
    done = ncd("query", images, "--url", f"grpc://{server.grpc_url}", "--out", target, "--top-k", 5)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in target.read_text().splitlines()]


def from_file(server: TritonServer, picture: Path) -> dict[str, Any]:
    """What the model that takes image files says in JSON."""
    asked = grpc.InferInput("image", [1, 1], "BYTES")
    asked.set_data_from_numpy(np.array([[picture.read_bytes()]], object))
    with grpc.InferenceServerClient(server.grpc_url) as client:
        answer: dict[str, Any] = json.loads(client.infer("ncd_global_jpeg", [asked]).as_numpy("json")[0, 0])
    return answer


@pytest.mark.triton
def test_names_merges_and_junk_reach_every_answer(triton: None, place: Path, glyphs: Path, ncd: Any) -> None:
    pictures = glyphs / "test"
    loaded = Bundle.read(place / "bundle")
    images = np.stack([load_array(path, loaded.manifest.preprocess) for path in find_images([pictures])])
    with TritonServer(place / "model_repository", live_updates=True) as server:
        server.wait_ready(120)
        before = queried(server, pictures, ncd, place / "before.jsonl")
        unnamed = Client(server.grpc_url).answer(images)
        sizes = np.bincount([row["cluster_id"] for row in before], minlength=5)
        junk, kept, target, second, largest = sizes.argsort(kind="stable").tolist()
        entries = {target: {"name": "Möwe: groß"}, largest: {"merge_into": second}, second: {"merge_into": target}}
        restore = ncd("name", "export", "--bundle", place / "bundle", "--out", place / "restore.json")
        applied = ncd("name", "apply", write_names(place, {**entries, junk: {"junk": True}}), cwd=place)
        assert applied.returncode == 0, applied.stderr
        assert "5 clusters: " in applied.stdout and "model_repository/ncd_global/2" in applied.stdout

        assert server.probe.load("ncd_global") is None
        labels = {junk: "junk", kept: f"cluster-{kept}"} | dict.fromkeys((target, second, largest), "Möwe: groß")
        moved = {second: target, largest: target}
        after = queried(server, pictures, ncd, place / "after.jsonl")
        for old, new in zip(before, after, strict=True):
            sums = dict.fromkeys((junk, kept, target), 0.0)
            for candidate in old["top_k"]:
                sums[moved.get(candidate["cluster_id"], candidate["cluster_id"])] += candidate["probability"]
            assert {entry["cluster_id"]: entry["cluster_name"] for entry in new["top_k"]} == {
                i: labels[i] for i in sums
            }
            answered = {entry["cluster_id"]: entry["probability"] for entry in new["top_k"]}
            assert answered == pytest.approx(sums, abs=1e-5)
            assert new["cluster_id"] == max(sums, key=lambda number: answered[number])
            assert (new["cluster_name"], new["fit"]) == (labels[new["cluster_id"]], old["fit"])
        assert Client(server.grpc_url).cluster_names == [labels[number] for number in range(5)]
        picture = Path(after[0]["path"])
        told = from_file(server, picture)
        assert (told["cluster_id"], told["cluster_name"]) == (after[0]["cluster_id"], after[0]["cluster_name"])

        assert restore.returncode == 0, restore.stderr
        undone = ncd("name", "apply", place / "restore.json", "--keep", 1, cwd=place)
        assert undone.returncode == 0, undone.stderr
        assert server.probe.load("ncd_global") is None
        assert np.array_equal(Client(server.grpc_url).answer(images).probabilities, unnamed.probabilities)
        assert from_file(server, picture)["cluster_name"] == before[0]["cluster_name"]


def test_a_bundle_s_names_are_listed(place: Path, ncd: Any) -> None:
    names = write_names(
        place, {0: {"name": "[b]gull"}, 1: {"merge_into": 0}, 2: {"junk": True}, 3: {"name": "[b]gull"}}
    )
    applied = ncd("name", "apply", names, cwd=place)
    assert applied.returncode == 0, applied.stderr
    assert "note: clusters 0, 3 share the name '[b]gull'" in applied.stderr
    listed = ncd("name", "list", "--bundle", place / "bundle", "--json")
    counts = Bundle.read(place / "bundle").reference().counts.tolist()
    states = ["named", "merged", "junk", "named", "unnamed"]
    rows = json.loads(listed.stdout)
    assert [(row["cluster_id"], row["state"], row["images"]) for row in rows] == [
        *zip(range(5), states, counts, strict=True)
    ]
    assert [row["cluster_name"] for row in rows] == ["[b]gull", "[b]gull", "junk", "[b]gull", "cluster-4"]
    assert [row["merged_into"] for row in rows] == [None, 0, None, None, None]
    table = ncd("name", "list", "--bundle", place / "bundle").stdout
    assert "merged into 0" in table and table.count("[b]gull") == 3
    exported = json.loads(ncd("name", "export", "--bundle", place / "bundle").stdout)
    assert exported == {
        "checkpoint": Bundle.read(place / "bundle").manifest.checkpoint,
        "bundle": str(place / "bundle"),
        "clusters": {**json.loads(names.read_text())["clusters"], "4": {}},
    }


def test_what_is_refused_changes_nothing(place: Path, ncd: Any) -> None:
    stranger = write_names(place, {9: {"name": "gull"}}).rename(place / "stranger.json")
    other = write_names(place, {}, checkpoint="0" * 12).rename(place / "other.json")
    nowhere = write_names(place, {}, bundle=None).rename(place / "nowhere.json")
    moved = write_names(place, {}, bundle="/nowhere").rename(place / "moved.json")
    names = write_names(place, {0: {"name": "gull"}})
    with unchanged(place):
        for arguments, code, words in (
            (("apply", names, "--keep", 0), 2, ("--keep",)),
            (("apply", names, "--model-name", "a b"), 2, ("'a b' is not a valid model name", "hint:")),
            (("apply", nowhere), 3, ("no exported run in this folder", "hint: ncd-serve export RUN")),
            (("export", "--bundle", "bundle", "--out", names), 2, ("names.json exists", "hint: choose another --out")),
            (("apply", "none.json"), 3, ("cannot read none.json", "hint:")),
            (("apply", place / "bundle" / "labels.txt"), 3, ("Invalid JSON", "hint: it looks like")),
            (("apply", stranger), 3, ("cluster 9 is not in the model", "0 to 4")),
            (("apply", other), 3, ("for the clusters of model 000000000000", "hint:")),
            (("apply", moved), 3, ("/nowhere is not a bundle", "hint:")),
            (("list", "--bundle", "model_repository"), 3, ("is not a bundle", "hint:")),
            (("apply", names, "--repository", names), 3, ("cannot write to", "hint:")),
        ):
            assert_kind(ncd("name", *arguments, cwd=place), code, *words)
