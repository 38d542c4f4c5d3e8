"""The second round as a user walks it, each command the last line of the one before, while a real Triton answers."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.rows.assignment import assign_images
from ncd_serve.runners import Answer, OnnxRunner
from ncd_serve.triton import TritonServer
from tests.contract.test_exit_codes import assert_kind
from tests.export.folders import unchanged
from tests.serve.patterns import CLUSTERS, KNOWN, draw, make_bundle, save

NEW = 20
NAMES = ["auk", "tern", "gull"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "bundle", cluster_names=NAMES)
    save(tmp_path / "new", KNOWN, 30, seed=1)
    save(tmp_path / "new", NEW, 40, seed=1)
    return tmp_path


def last_command(done: Any) -> list[str]:
    """The words of the command that an output ends with."""
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    assert line.startswith("next: ncd-serve "), done.stdout
    return shlex.split(line.removeprefix("next: ncd-serve "))


def walk(place: Path, ncd: Any) -> list[list[str]]:
    """From drift to an export, by copying last lines."""
    assert ncd("assign", "new", "--bundle", "bundle", "--out", "my rows.csv", cwd=place).returncode == 0
    commands = [last_command(ncd("drift", "my rows.csv", "--bundle", "bundle", cwd=place))]
    for _ in range(2):
        commands.append(last_command(ncd(*commands[-1], cwd=place)))
        name_candidates(place / "candidates.json")
    return commands


def name_candidates(file: Path) -> None:
    content = json.loads(file.read_text())
    content["candidates"][0]["name"] = "owl"
    file.write_text(json.dumps(content))


class Asking:
    """Requests without a pause, by a client that was opened before; every answer and every failure is kept."""

    def __init__(self, client: Client, images: np.ndarray) -> None:
        self.answers: list[Answer] = []
        self.failures: list[Exception] = []
        self._client, self._images, self._over = client, images, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(self._client.answer(self._images))
            except Exception as error:
                self.failures.append(error)


@pytest.mark.slow
@pytest.mark.triton
def test_the_loop_is_walked_by_copying_last_lines_while_a_server_answers(triton: None, place: Path, ncd: Any) -> None:
    assert ncd("export", "bundle", cwd=place).returncode == 0
    commands = walk(place, ncd)
    assert [words[0] for words in commands] == ["discover", "train", "export"]
    images = np.concatenate([draw(kind, 5, seed=8) for kind in (*range(KNOWN, KNOWN + CLUSTERS), NEW)])
    with TritonServer(place / "model_repository", live_updates=True) as server:
        server.wait_ready(120)
        with Client(server.grpc_url) as client, Asking(client, images) as asking:
            first = client.answer(images)
            assert client.cluster_names == NAMES
            assert last_command(ncd(*commands[-1], cwd=place))[0] == "serve"
            assert server.probe.load("ncd_global") is None and server.probe.load("ncd_global_jpeg") is None
            second = client.answer(images)
            assert client.cluster_names == [*NAMES, "owl"], "a client that was opened before knows the new name"
            files = save(place / "later", NEW, 10, seed=9) + save(place / "later", KNOWN, 10, seed=9)
            rows = list(client.assign(files))
            assert [row.cluster_name for row in rows] == ["owl"] * 10 + ["auk"] * 10
            own = assign_images(files, OnnxRunner(Bundle.read(place / "bundle-2")))
            assert [row.cluster_id for row in rows] == [row.cluster_id for row in own], "as without a server"
            with grpc.InferenceServerClient(server.grpc_url) as raw:
                facts = raw.get_model_config("ncd_global").config.parameters
            assert facts["ncd_generation"].string_value == "2"
            # The generation before can be served again.
            earlier = ncd("export", "bundle", cwd=place)
            assert earlier.returncode == 0 and "there is a newer generation, bundle-2" in earlier.stderr
            assert server.probe.load("ncd_global") is None
            again = client.answer(images)
            (place / "names.json").write_text('{"clusters": {"0": {"name": "puffin"}}}')
            assert ncd("name", "apply", "names.json", "bundle", cwd=place).returncode == 0
            assert server.probe.load("ncd_global") is None
            client.answer(images)
            assert client.cluster_names[:2] == ["puffin", "tern"], "and so it does where only names have changed"
    assert asking.failures == [] and len(asking.answers) > 3
    old = np.arange(len(images)) < 5 * CLUSTERS
    assert (second.probabilities.argmax(1) == np.repeat([0, 1, 2, 3], 5)).all()
    assert np.array_equal(first.probabilities[old], second.probabilities[old, :CLUSTERS])
    assert np.array_equal(first.probabilities, again.probabilities[:, :CLUSTERS])
    assert first.outside is not None and first.outside[~old].min() > 0.9 and first.outside[old].max() < 0.1
    for answer in asking.answers:
        assert np.array_equal(answer.probabilities[old, :CLUSTERS], first.probabilities[old]), "old ids mean the same"


def test_history_and_carried_names(place: Path, ncd: Any) -> None:
    walk(place, ncd)
    listed = json.loads(ncd("history", "bundle-2", "--json", cwd=place).stdout)
    assert [(each["generation"], each["clusters"]) for each in listed] == [(1, 3), (2, 4)]
    assert listed[1]["changes"] == "1 grown; 2 kept; 1 new (owl)" and Path(listed[0]["folder"]) == place / "bundle"
    assert last_command(ncd("history", "bundle-2", cwd=place)) == ["export", "bundle-2"]
    save(place / "newer", NEW + 1, 30)
    late = ncd("train", "--after", "bundle", "--add", "newer", cwd=place)
    assert_kind(late, 2, "note: there is a newer generation, bundle-2", "hint: --after bundle-2 goes on from")
    again = last_command(ncd("discover", "newer", "--bundle", "bundle-2", cwd=place))
    assert again[-1] == "candidates-2.json", "those of the first batch stay"
    make_bundle(place / "other" / "bundle")
    other = place / "other" / "bundle" / "bundle.json"
    other.write_text(other.read_text().replace("0123456789ab", "f" * 12))
    images = place / "all"
    for kind in range(KNOWN, KNOWN + CLUSTERS):
        save(images, kind, 10, seed=3)
    carried = ncd("name", "carry", "bundle", "other/bundle", "--images", images, cwd=place)
    assert "3 of 3 names are carried over" in carried.stdout
    applied = ncd(*last_command(carried), cwd=place)
    assert applied.returncode == 0, applied.stderr
    assert Bundle.read(place / "other" / "bundle").manifest.cluster_names == NAMES


def test_what_is_refused_changes_nothing(place: Path, ncd: Any) -> None:
    save(place / "one", NEW, 1)
    (place / "foreign.json").write_text('{"checkpoint": "ffffffffffff", "generation": 1, "candidates": []}')
    (place / "unclear.json").write_text('{"clusters": {}, "images": {"a.png": "perhaps"}}')
    (place / "negative.json").write_text('{"clusters": {}, "images": {"a.png": -2}}')
    (place / "twice.json").write_text('{"clusters": {}, "images": {"a.png": 1, "./a.png": "wrong"}}')
    shutil.copytree(place / "bundle", place / "same")
    after = ("train", "--after", "bundle", "--add", "new")
    with unchanged(place):
        for arguments, code, words in (
            (("discover", "one", "--bundle", "bundle"), 3, ("1 readable images are too few", "hint:")),
            ((*after, "--accept", "foreign.json"), 3, ("of model ffffffffffff", "hint:")),
            ((*after, "--novel-classes", "auto"), 2, ("--novel-classes is not for --after", "hint:")),
            (("train", "--add", "new"), 2, ("--after and --add belong together", "hint:")),
            (("train", "--after", "bundle"), 2, ("--after and --add belong together", "hint:")),
            ((*after, "--promote"), 2, ("--promote is for --retrain", "hint:")),
            ((*after, "--retrain"), 3, ("in no run directory", "can still be appended")),
            (("name", "apply", "twice.json", "--bundle", "bundle"), 3, ("contradicting entries", "hint:")),
            (("export", "bundle", "--precision", "int8"), 2, ("are for runs", "hint:")),
            (("name", "apply", "unclear.json", "--bundle", "bundle"), 3, ("images.a.png", '"b.jpg": "wrong"')),
            (("name", "apply", "negative.json", "--bundle", "bundle"), 3, ("given to cluster -2", "hint:")),
            (("name", "carry", "bundle", "same"), 2, ("of the same model", "hint:")),
        ):
            assert_kind(ncd(*arguments, cwd=place), code, *words)
