"""`serve()` as a program calls it: a real Triton that answers when it returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncd_serve.errors import DataError, NcdError, ServerError, UsageError
from ncd_serve.triton.serve import serve
from tests.serve.small_models import CONFIG, LABELS, SPEC, group_is_gone, make_export, needs_triton, regions

pytestmark = [pytest.mark.triton, needs_triton]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    make_export(tmp_path / "models", config=CONFIG + SPEC)
    return tmp_path / "models"


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    target = tmp_path / "photos" / "a.png"
    target.parent.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)).save(target)
    return target


def test_two_servers_answer_side_by_side_and_end_with_their_blocks(repository: Path, photo: Path) -> None:
    before = regions()  # of servers that other tests keep
    with serve(str(repository)) as first, serve(repository) as second:
        assert len({first.grpc_url, first.http_url, second.grpc_url, second.http_url}) == 4
        client = first.client
        assert client is first.client
        rows = [next(server.client.assign([photo.parent])) for server in (first, second)]
        assert rows[0] == rows[1] and rows[0].path == str(photo) and rows[0].cluster_name in LABELS
        group = first._triton.pid
    assert group_is_gone(group) and regions() == before
    assert not client._closing.alive, "the client is closed with its server"


def test_files_pil_images_and_arrays_get_the_same_answer(repository: Path, photo: Path) -> None:
    image = Image.open(photo)
    with serve(repository) as server:
        rows = list(server.client.assign([photo, image, str(photo), np.asarray(image)]))
        (alone,) = server.client.assign(image)
        batch = list(server.client.assign(np.stack([np.asarray(image)] * 2)))
    assert [row.path for row in rows] == [str(photo), "image-0", str(photo), "image-1"]
    assert alone.path == "image-0" and [row.path for row in batch] == ["image-0", "image-1"]
    answers = {(row.status, row.cluster_id, round(row.confidence or 0, 5)) for row in [*rows, alone, *batch]}
    assert len(answers) == 1 and answers.pop()[0] == "ok"


def test_rows_that_are_read_too_late_say_so(repository: Path, photo: Path) -> None:
    with serve(repository) as server:
        rows = server.client.assign([photo])
    with pytest.raises(UsageError, match="is closed") as raised:
        list(rows)
    assert "list(client.assign(images))" in str(raised.value.hint)


def test_mistakes_are_errors_with_a_hint_and_leave_no_server(repository: Path, tmp_path: Path) -> None:
    wrong = [
        (tmp_path / "none", {}, DataError, "cannot read"),
        (repository / "birds", {}, DataError, "is the folder of one model"),
        (repository, {"model": "bird"}, UsageError, "has no model 'bird'"),
        (repository, {"triton_options": ["--grpc-port=1"]}, UsageError, "is set by ncd-serve itself"),
        (repository, {"timeout": 0.0}, ServerError, "was not ready after 0 s"),
    ]
    before = regions()
    for folder, options, kind, text in wrong:
        with pytest.raises(NcdError, match=text) as raised:
            serve(folder, **options)
        assert type(raised.value) is kind and raised.value.hint
    assert regions() == before


def test_a_server_that_is_not_stopped_ends_with_its_program(repository: Path) -> None:
    code = f"from ncd_serve.triton.serve import serve; print(serve({str(repository)!r})._triton.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert group_is_gone(int(done.stdout))
