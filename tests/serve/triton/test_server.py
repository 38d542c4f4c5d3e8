"""The launcher and its backend against a real Triton process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from ncd_serve.doctor.checks import take_steps
from ncd_serve.doctor.installation import installation_steps
from ncd_serve.errors import DataError, MissingExtraError, ServerError
from ncd_serve.triton import TritonServer, check_repository, find_triton, install
from ncd_serve.triton.process import Ports, choose_port, start_process
from tests.serve.small_models import (
    CONFIG,
    LABELS,
    READY_SECONDS,
    SHAPES,
    Array,
    Direct,
    directly,
    group_is_gone,
    make_classifier,
    make_export,
    make_lookup,
    needs_triton,
    needs_wheel,
    random_images,
    regions,
    stubs,
    tensor,
    wait_until,
)

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a path with spaces")
    make_classifier(folder / "birds")
    make_lookup(folder / "lookup")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    elsewhere = tmp_path_factory.mktemp("cwd")
    (elsewhere / "model.py").write_text("raise ImportError('the stub imported a file of the user')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        with TritonServer(repository) as server:
            server.wait_ready(READY_SECONDS)
            yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def direct(repository: Path) -> Direct:
    return directly(repository / "birds" / "1" / "model.onnx")


@needs_triton
@pytest.mark.parametrize("count", [1, 3, 8])
def test_answers_equal_onnxruntime_bit_for_bit(client: grpc.InferenceServerClient, direct: Direct, count: int) -> None:
    images = random_images(count, seed=count)
    answer = client.infer("birds", [tensor("image", images)])
    for name, expected in direct(images).items():
        served = answer.as_numpy(name)
        assert served.shape == (count, *(SHAPES[name] or [1])), name
        assert served.dtype == expected.dtype, name
        assert served.tobytes() == expected.tobytes(), name


@needs_triton
def test_requests_of_one_batch_are_merged_and_split_again(client: grpc.InferenceServerClient, direct: Direct) -> None:
    counts = [1, 2, 3, 2] * 4
    names = ["embedding", "cluster_id"]
    answers: Queue[tuple[int, Any, Any]] = Queue()
    for index, count in enumerate(counts):
        client.async_infer(
            "birds",
            [tensor("image", random_images(count, seed=index))],
            partial(lambda index, result, error: answers.put((index, result, error)), index),
            outputs=[grpc.InferRequestedOutput(name) for name in ("batch_size", names[index % 2])],
        )
    merged = False
    for _ in counts:
        index, result, error = answers.get(timeout=20)
        assert error is None
        name, other = names[index % 2], names[1 - index % 2]
        expected = direct(random_images(counts[index], seed=index))[name]
        # Not bit for bit: the size of a matrix product may change the order of its sums.
        np.testing.assert_allclose(result.as_numpy(name).reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
        assert result.as_numpy(other) is None
        merged |= result.as_numpy("batch_size").max() > counts[index]
    assert merged


@needs_triton
def test_only_the_selected_output_comes_back(client: grpc.InferenceServerClient) -> None:
    wanted = [grpc.InferRequestedOutput("confidence")]
    answer = client.infer("birds", [tensor("image", random_images(2))], outputs=wanted)
    assert [output.name for output in answer.get_response().outputs] == ["confidence"]


@needs_triton
def test_classification_names_the_best_clusters(client: grpc.InferenceServerClient, direct: Direct) -> None:
    images = random_images(2)
    wanted = [grpc.InferRequestedOutput("probabilities", class_count=2)]
    rows = client.infer("birds", [tensor("image", images)], outputs=wanted).as_numpy("probabilities")
    for row, probabilities in zip(rows, direct(images)["probabilities"], strict=True):
        best = np.argsort(-probabilities)[:2]
        split = [text.decode().split(":", 2) for text in row]
        assert [(int(index), label) for _, index, label in split] == [(index, LABELS[index]) for index in best]
        np.testing.assert_allclose([float(score) for score, _, _ in split], probabilities[best], atol=1e-5)


@needs_triton
def test_a_model_without_config_is_served_and_tells_its_errors(client: grpc.InferenceServerClient) -> None:
    answer = client.infer("lookup", [tensor("row", np.array([[2], [0]]))])
    np.testing.assert_array_equal(answer.as_numpy("value"), [[4, 5], [0, 1]])
    with pytest.raises(InferenceServerException, match="out of data bounds"):
        client.infer("lookup", [tensor("row", np.array([[7]]))])
    assert client.infer("lookup", [tensor("row", np.array([[1]]))]).as_numpy("value").tolist() == [[2, 3]]


@needs_triton
def test_a_request_that_fails_in_the_model_fails_alone(client: grpc.InferenceServerClient) -> None:
    rows, answers = [0, 7, 1, 7, 2, 0] * 5, Queue[tuple[int, Any, Any]]()
    for row in rows:
        given = [tensor("row", np.array([[row]]))]
        client.async_infer("lookup", given, partial(lambda row, result, error: answers.put((row, result, error)), row))
    for _ in rows:
        row, result, error = answers.get(timeout=20)
        assert (error is None) == (row < 7), (row, error)
        assert error is not None or result.as_numpy("value").tolist() == [[2 * row, 2 * row + 1]]


def request(name: str, array: Array, datatype: str = "UINT8") -> list[grpc.InferInput]:
    """An input that says what it is told to say, fitting or not."""
    given = grpc.InferInput(name, array.shape, datatype)
    given._raw_content = array.tobytes()
    return [given]


FOUR = random_images(4)
FAULTS = {
    "wrong type": ("birds", request("image", FOUR.astype(np.float32), "FP32"), {}, "INVALID_ARGUMENT", "data-type"),
    "wrong shape": ("birds", request("image", FOUR[:, :3]), {}, "INVALID_ARGUMENT", "shape"),
    "no batch": ("birds", request("image", FOUR[0]), {}, "INVALID_ARGUMENT", "batch-size|shape"),
    "wrong name": ("birds", request("picture", FOUR), {}, "INVALID_ARGUMENT", "picture"),
    "twice": ("birds", request("image", FOUR) + request("more", FOUR), {}, "INVALID_ARGUMENT", "expected 1 inputs"),
    "nothing": ("birds", [], {}, "INVALID_ARGUMENT", "expected 1 inputs|missing"),
    "empty batch": ("birds", request("image", FOUR[:0]), {}, "INVALID_ARGUMENT", "shape|batch|size"),
    "batch too large": ("birds", request("image", random_images(9)), {}, "INVALID_ARGUMENT", "batch-size must be <= 8"),
    "unknown output": ("birds", request("image", FOUR), {"outputs": ["names"]}, "INVALID_ARGUMENT", "names"),
    "unknown model": ("owls", request("image", FOUR), {}, "NOT_FOUND", "owls"),
    "unknown version": ("birds", request("image", FOUR), {"model_version": "7"}, "NOT_FOUND", "version 7"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_request_is_told_why_and_harms_nobody(client: grpc.InferenceServerClient, fault: str) -> None:
    model, inputs, options, status, reason = FAULTS[fault]
    if "outputs" in options:
        options = {"outputs": [grpc.InferRequestedOutput(name) for name in options["outputs"]]}
    with pytest.raises(InferenceServerException, match=reason) as caught:
        client.infer(model, inputs, **options)
    assert caught.value.status() == f"StatusCode.{status}"
    assert len(client.infer("birds", [tensor("image", FOUR)]).as_numpy("cluster_id")) == 4


@needs_wheel
def test_threads_instances_and_file_name_are_as_configured(tmp_path: Path) -> None:
    make_classifier(tmp_path / "one")
    more = CONFIG.replace("count: 1", "count: 2").replace('string_value: "1"', 'string_value: "4"')
    make_classifier(tmp_path / "four", more + 'default_model_filename: "net.onnx"')
    (tmp_path / "four" / "1" / "model.onnx").rename(tmp_path / "four" / "1" / "net.onnx")
    with TritonServer(tmp_path) as server:
        server.wait_ready(READY_SECONDS)
        (one,), four = ([_threads(pid) for pid in stubs(server, name)] for name in ("one", "four"))
        assert four == [one + 3, one + 3]


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@needs_triton
def test_metrics_are_served(server: TritonServer) -> None:
    with urlopen(server.metrics_url, timeout=5) as page:
        assert b"nv_inference_count" in page.read()


@needs_triton
def test_a_port_in_use_is_told_before_anything_starts(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}: Address already in use") as caught:
            TritonServer(repository, grpc_port=port).start()
    assert caught.value.hint


@needs_triton
@pytest.mark.parametrize("named", [False, True])
def test_a_port_that_is_taken_while_triton_starts_is_chosen_again_unless_it_was_named(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lookup(tmp_path / "lookup")
    usual = Ports(*(choose_port("127.0.0.1", None) for _ in Ports._fields))
    with socket.create_server(("127.0.0.1", usual.http)), ExitStack() as others:

        def start_late(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            if f"--grpc-port={usual.grpc}" in command:
                others.enter_context(socket.create_server(("127.0.0.1", usual.grpc)))
            return start_process(command, **options)

        monkeypatch.setattr("ncd_serve.triton.server.start_process", start_late)
        wanted = usual.grpc if named else None
        with TritonServer(tmp_path, grpc_port=wanted, preferred_ports=usual) as server:
            if named:
                with pytest.raises(ServerError, match=f"127.0.0.1:{usual.grpc}' already in use"):
                    server.wait_ready(READY_SECONDS)
            else:
                server.wait_ready(READY_SECONDS)
                assert server.ports.metrics == usual.metrics and not {*server.ports} & {usual.http, usual.grpc}


@needs_triton
def test_a_start_that_fails_half_way_leaves_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerError, match="cannot write the log"):
        TritonServer(repository, log_path=tmp_path / "missing" / "triton.log").start()
    assert list(tmp_path.iterdir()) == []


@needs_triton
def test_a_corrupt_model_is_named(tmp_path: Path) -> None:
    make_classifier(tmp_path / "models" / "birds")
    broken = tmp_path / "models" / "broken" / "1" / "model.onnx"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a model")
    log = tmp_path / "triton.log"
    log.write_text("E0101 00:00:00.000000 1 x.cc:1] \"failed to load 'older' version 1: gone\"\n")
    with TritonServer(tmp_path / "models", log_path=log) as server, pytest.raises(ServerError) as caught:
        server.wait_ready(READY_SECONDS)
    assert "failed to load 'broken' version 1" in str(caught.value)
    assert "Protobuf parsing failed" in str(caught.value)
    assert str(broken) in str(caught.value)
    assert "birds" not in str(caught.value)
    assert "older" not in str(caught.value)
    assert str(log) in (caught.value.hint or "")


@needs_wheel
def test_what_the_backend_cannot_honour_is_refused_by_name(tmp_path: Path) -> None:
    accelerator = 'execution_accelerators { cpu_execution_accelerator: [ { name: "openvino" } ] }'
    make_classifier(tmp_path / "a", CONFIG + 'parameters { key: "execution_mode" value: { string_value: "1" } }')
    make_classifier(tmp_path / "b", CONFIG + f"optimization {{ {accelerator} }}")
    make_classifier(tmp_path / "c", CONFIG.replace("dims: [ 5 ]", "dims: [ 6 ]"))
    make_classifier(tmp_path / "d", CONFIG.replace("KIND_CPU", "KIND_GPU"))
    make_classifier(tmp_path / "e", CONFIG.replace("dims: [ 4, 4, 3 ]", "dims: [ 4, 4, 3 ] allow_ragged_batch: true"))
    make_classifier(tmp_path / "f", CONFIG + "optimization { priority: PRIORITY_MAX eager_batching: true }")
    make_classifier(tmp_path / "g", CONFIG.replace("count: 1", 'count: 1 host_policy: "numa"'))
    make_classifier(tmp_path / "h", CONFIG + "model_transaction_policy { decoupled: true }")
    with TritonServer(tmp_path) as server, pytest.raises(ServerError) as caught:
        server.wait_ready(READY_SECONDS)
    for model, reason in {
        "a": "cannot honour parameters: execution_mode",
        "b": "cannot honour optimization: execution_accelerators",
        "c": r"'probabilities' is \[-1, 6\] in config.pbtxt, \[-1, 5\] in model.onnx",
        "d": "KIND_GPU but no GPUs are available",
        "e": "cannot honour input: allow_ragged_batch",
        "f": "cannot honour optimization: eager_batching, optimization: priority",
        "g": "cannot honour instance_group: host_policy",
        "h": "cannot honour model_transaction_policy: decoupled",
    }.items():
        assert caught.match(f"failed to load '{model}' version 1: .*{reason}")


@needs_triton
def test_stop_leaves_nothing_even_when_the_server_hangs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = regions()
    server = TritonServer(repository)
    server.start()
    server.wait_ready(READY_SECONDS)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(patience=0.5)
    server.stop()
    assert wait_until(lambda: group_is_gone(pid), 5)
    assert regions() <= before
    assert list(tmp_path.iterdir()) == []


@needs_triton
def test_the_server_ends_with_the_process_that_started_it(repository: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ncd_serve.triton import TritonServer\n"
        "server = TritonServer(Path(sys.argv[1])); server.start(); server.wait_ready(60)\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(repository)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert wait_until(lambda: group_is_gone(pid), 30)
    assert not regions(parent.pid)


@pytest.fixture
def no_server_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("no_server_on_path")
def test_no_triton_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        find_triton()
    assert caught.value.exit_code == 6
    assert "pip install 'ncd-serve[triton]'" in (caught.value.hint or "")


@needs_wheel
@pytest.mark.usefixtures("no_server_on_path")
def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "version", lambda name: "2.1.0")
    with pytest.raises(ServerError, match=r"corrupts arrays of numpy 2\.1\.0") as caught:
        find_triton()
    assert "numpy<2" in (caught.value.hint or "")


@needs_wheel
@pytest.mark.usefixtures("no_server_on_path")
def test_a_python_without_its_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: None)
    monkeypatch.setattr("sys.base_prefix", "/nowhere")
    with pytest.raises(MissingExtraError, match=r"libpython3\.\d+\.so\.1\.0") as caught:
        find_triton()
    assert "apt install libpython3" in (caught.value.hint or "")


def test_a_server_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "tritonserver"
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_triton()
    assert (found.executable, found.source) == (server, "PATH")
    assert found.lay_out(tmp_path / "backends") == []
    assert found.environment() == dict(os.environ)


def test_a_server_on_path_without_a_backend_for_onnx_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_classifier(tmp_path / "models" / "birds")
    server = tmp_path / "opt" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(server.parent))
    with pytest.raises(ServerError, match="has no ONNX Runtime backend") as caught:
        TritonServer(tmp_path / "models").start()
    assert "--backend-directory" in (caught.value.hint or "")
    (problem,) = (check for check in take_steps("", installation_steps()) if check.what == "triton")
    assert problem.verdict == "problem" and "no ONNX Runtime backend" in problem.found and problem.fix
    backend = tmp_path / "opt" / "backends" / "onnxruntime" / "libtriton_onnxruntime.so"
    backend.parent.mkdir(parents=True)
    backend.touch()
    find_triton().check_backend()
    with pytest.raises(ServerError):
        find_triton().check_backend(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (None, "No such file or directory"),
        ("README.md", "no model folders"),
        ("birds/config.pbtxt", "no version with a model.onnx in .*birds"),
        ("birds/v1/model.onnx", "no version with a model.onnx in .*birds"),
        ("birds/0/model.onnx", "no version with a model.onnx in .*birds"),
        ("my birds/1/model.onnx", "'my birds' is not a valid model name"),
    ],
)
def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path, file: str | None, reason: str) -> None:
    folder = tmp_path / "models"
    if file is not None:
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
    with pytest.raises(DataError, match=reason) as caught:
        check_repository(folder)
    assert "ncd-serve export" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('name: "owls"', "names the model 'owls', its folder 'birds'"),
        ('output [ { name: "a" label_filename: "names.txt" } ]', "needs the labels names.txt, which do not exist"),
        ("max_batch: 3", "config.pbtxt is damaged: 1:1 .*max_batch"),
        ('backend: "python"', "no version with a model.py in .*birds"),
    ],
)
def test_a_configuration_that_cannot_work_is_explained(tmp_path: Path, config: str, reason: str) -> None:
    make_classifier(tmp_path / "birds", config)
    with pytest.raises(DataError, match=reason) as caught:
        check_repository(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        'default_model_filename: "$(touch ran).onnx"',
        'default_model_filename: "a b"',
        'default_model_filename: "../model.onnx"',
        'cc_model_filenames { key: "8.0" value: "`touch ran`" }',
        'backend: "../../evil"',
        'runtime: "x;touch ran"',
        'output [ { name: "a" label_filename: "../../../etc/passwd" } ]',
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/x;touch ran" } }',
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_no_name_of_a_configuration_reaches_a_shell_or_leaves_the_folder(
    tmp_path: Path, config: str, allowed: bool
) -> None:
    make_classifier(tmp_path / "birds", config)
    with pytest.raises(DataError, match="is not a plain name"):
        TritonServer(tmp_path, python_models=allowed).start()
    assert not list(tmp_path.rglob("ran")) and not Path("ran").exists()


@pytest.mark.parametrize(
    "place",
    [
        "birds/1/model.py",
        "birds/1/numpy.pyc",
        "birds/1/ncd_serve/errors.py",
        "birds/1/deep/er/x.so",
        "birds/libtriton_onnxruntime.so",
        "birds/1/libtriton_onnxruntime.so.1",
        "birds/triton_python_backend_stub",
        "birds/model.py",
    ],
)
def test_foreign_code_is_refused_unless_allowed(tmp_path: Path, place: str) -> None:
    make_classifier(tmp_path / "birds")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("import os")
    with pytest.raises(DataError, match="runs code of its own") as caught:
        check_repository(tmp_path)
    assert "--allow-python-models" in (caught.value.hint or "")
    assert check_repository(tmp_path, python_models=True) == ["birds"]


def test_our_own_model_for_images_is_told_from_one_that_was_changed(tmp_path: Path) -> None:
    make_export(tmp_path / "models")
    make_export(tmp_path / "models", version=2)
    assert check_repository(tmp_path / "models") == ["birds", "birds_jpeg"]
    carried = tmp_path / "models" / "birds_jpeg" / "{}" / "ncd_serve" / "preprocess.py"
    with Path(str(carried).format(1)).open("a") as stream:
        stream.write("# of an older export")
    assert check_repository(tmp_path / "models"), "Triton loads the newest version only"
    linked = Path(str(carried).format(2)).parent
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "more.py").touch()
    with pytest.raises(DataError, match=r"'birds_jpeg' runs code of its own: 2/ncd_serve/more.py"):
        check_repository(tmp_path / "models")


def test_the_folder_of_a_model_is_told_from_a_repository(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds")
    assert check_repository(tmp_path) == ["birds"]
    with pytest.raises(DataError, match="is the folder of one model") as caught:
        check_repository(tmp_path / "birds")
    assert caught.value.hint == f"use --repository {tmp_path}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_model_is_refused(tmp_path: Path) -> None:
    make_lookup(tmp_path / "lookup")
    (tmp_path / "lookup" / "1" / "model.onnx").chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        check_repository(tmp_path)
