"""Image files sent as they are, to the model that decodes them on a real Triton."""

from __future__ import annotations

import io
import json
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from PIL import Image
from tritonclient.utils import InferenceServerException

import ncd_serve
from ncd_serve.errors import DataError
from ncd_serve.preprocess import MAX_BYTES, PreprocessSpec, load_array
from ncd_serve.triton import TritonServer
from ncd_serve.triton.jpeg import DECODERS, INSTANCES
from ncd_serve.triton.jpeg.decoder import MEMORY_BYTES
from tests.serve.small_models import CONFIG, LABELS, READY_SECONDS, directly, make_export, needs_triton

pytestmark = [pytest.mark.triton, needs_triton]
SPEC = PreprocessSpec(resolution=4, resize=4)
CHECKED_IN = Path(__file__).parents[3] / "model_repository" / "ncd_global_jpeg" / "config.pbtxt"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "models"
    image = "data_type: TYPE_UINT8 dims: [ 4, 4, 3 ] zero_data: true"
    warm_up = f'model_warmup {{ name: "w" batch_size: 8 inputs {{ key: "image" value {{ {image} }} }} }}'
    make_export(folder, config=CONFIG.replace("max_queue_delay_microseconds: 100000", "") + warm_up)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository) as server:
        server.wait_ready(READY_SECONDS)
        for activity in server.activity().values():
            assert activity[:3] == (0, 0, 0) and math.isnan(activity.p50), "warm-up and our own probes do not count"
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


def photo(form: str, seed: int = 0, **options: Any) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((120, 90)).save(file, form, **options)
    return file.getvalue()


def huge_png() -> bytes:
    """A file of a hundred bytes that claims to hold 20,000 x 20,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def odd_tiff() -> bytes:
    """A TIFF whose strips begin at a fraction of a byte: Pillow ends in a TypeError."""
    data = bytearray(photo("TIFF"))
    start = struct.unpack_from("<I", data, 4)[0]
    for entry in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", data, start)[0], 12):
        if struct.unpack_from("<H", data, entry)[0] == 273:
            struct.pack_into("<HII", data, entry + 2, 5, 1, 0)
    return bytes(data)


def wide_webp() -> bytes:
    """A WebP of some hundred bytes with a canvas of a hundred million pixels."""
    file = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    data = bytearray(file.getvalue())
    assert data[12:16] == b"VP8X"
    data[24:27] = (2_482_432).to_bytes(3, "little")
    return bytes(data)


def blank_png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def many_scans(scans: int = 2000, side: int = 4000) -> bytes:
    """A progressive JPEG that goes over all its pixels again and again."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


def ask(client: grpc.InferenceServerClient, *files: bytes, outputs: list[str] | None = None) -> Any:
    image = grpc.InferInput("image", [len(files), 1], "BYTES")
    image.set_data_from_numpy(np.array(files, dtype=np.object_).reshape(-1, 1))
    wanted = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
    return client.infer("birds_jpeg", [image], outputs=wanted)


def expected(repository: Path, file: bytes) -> dict[str, Any]:
    answer = directly(repository / "birds" / "1" / "model.onnx")(load_array(file, SPEC)[None])
    number = int(answer["cluster_id"][0])
    return {"cluster_id": number, "cluster_name": LABELS[number], "confidence": float(answer["confidence"][0])}


def test_every_format_is_answered_as_if_the_client_had_decoded_it(
    client: grpc.InferenceServerClient, repository: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    files = [photo("JPEG"), photo("PNG", 1), photo("WEBP", 2), photo("GIF", 3), photo("JPEG", 4, exif=exif)]
    answer = ask(client, *files)
    for number, file in enumerate(files):
        wanted = expected(repository, file)
        assert answer.as_numpy("cluster_id")[number, 0] == wanted["cluster_id"]
        assert answer.as_numpy("cluster_name")[number, 0].decode() == wanted["cluster_name"]
        assert answer.as_numpy("confidence")[number, 0] == pytest.approx(wanted["confidence"], abs=1e-6)
        assert json.loads(answer.as_numpy("json")[number, 0]) == pytest.approx(wanted, abs=1e-6)


def test_a_file_posted_as_it_is_gets_an_answer_that_a_shell_can_read(server: TritonServer, repository: Path) -> None:
    connection = HTTPConnection(server.http_url, timeout=30)
    headers = {"Inference-Header-Content-Length": "0"}
    connection.request("POST", "/v2/models/birds_jpeg/infer", photo("JPEG"), headers)
    body = connection.getresponse().read()
    connection.close()
    start = body.index(b'{"cluster_id')
    answer = json.loads(body[start : body.index(b"}", start) + 1])
    assert answer == pytest.approx(expected(repository, photo("JPEG")), abs=1e-6)


def test_figures_count_requests_of_clients_only(server: TritonServer, client: grpc.InferenceServerClient) -> None:
    before = server.activity()
    for _ in range(3):
        ask(client, photo("JPEG"), photo("PNG"))
        assert server.probe.hanging(server.pid) is None
    after = server.activity()
    for model in ("birds", "birds_jpeg"):
        assert after[model].images - before[model].images == 6, model


def test_only_the_selected_output_comes_back(client: grpc.InferenceServerClient) -> None:
    answer = ask(client, photo("JPEG"), outputs=["cluster_name"])
    assert [output.name for output in answer.get_response().outputs] == ["cluster_name"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"", "the file is empty"),
        (lambda: b"no image", "not an image of a known format"),
        (lambda: photo("JPEG")[:400], "cannot be decoded"),
        (huge_png, r"exceeds limit|px are more than"),
        (lambda: bytes(MAX_BYTES + 1), f"bytes are more than {MAX_BYTES:,}"),
        (odd_tiff, "cannot be decoded"),
        (wide_webp, r"cannot be decoded|too long|MiB"),
        (lambda: blank_png(8000), "MiB"),
        (many_scans, r"within 2 s|scans"),
    ],
    ids=["empty", "text", "truncated", "too many pixels", "too many bytes", "odd", "wide", "large", "slow"],
)
def test_a_bad_image_is_the_fault_of_its_request_alone(
    client: grpc.InferenceServerClient, make: Callable[[], bytes], reason: str
) -> None:
    file = make()
    good: list[Any] = []
    beside = [threading.Thread(target=lambda: good.append(ask(client, photo("JPEG")))) for _ in range(4)]
    for thread in beside:
        thread.start()
    with pytest.raises(InferenceServerException, match=reason) as caught:
        ask(client, file)
    for thread in beside:
        thread.join()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert len(good) == 4


def memory_of_group(leader: int) -> int:
    """The bytes that the processes of a group have taken at most, each at its own peak."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                total += int((process / "status").read_text().split("VmHWM:")[1].split()[0]) << 10
        except (OSError, IndexError):  # it has ended
            continue
    return total


def test_good_requests_are_unharmed_beside_bad_ones_and_memory_is_bounded(
    server: TritonServer, repository: Path
) -> None:
    good, bad, wanted = photo("JPEG"), [odd_tiff(), wide_webp(), blank_png(9900)], expected(repository, photo("JPEG"))
    answers: list[Any] = []
    refused: list[str] = []
    over = threading.Event()

    def ask_good() -> None:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            answers.extend(ask(client, good).as_numpy("cluster_id")[0, 0] for _ in range(95))

    def ask_bad(file: bytes) -> None:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            while not over.is_set():
                with pytest.raises(InferenceServerException) as caught:
                    ask(client, file)
                refused.append(caught.value.status())

    attackers = [threading.Thread(target=ask_bad, args=(file,)) for file in bad]
    friends = [threading.Thread(target=ask_good) for _ in range(4)]
    for thread in attackers + friends:
        thread.start()
    for thread in friends:
        thread.join()
    over.set()
    for thread in attackers:
        thread.join()
    assert answers == [wanted["cluster_id"]] * 380
    assert len(refused) > 50 and set(refused) == {"StatusCode.INVALID_ARGUMENT"}
    budget = INSTANCES * DECODERS * (MEMORY_BYTES + (100 << 20)) + (800 << 20)
    assert memory_of_group(server.pid) < budget


def test_the_bad_one_of_several_images_is_named(client: grpc.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="image 1: not an image"):
        ask(client, photo("JPEG"), b"no image", photo("PNG"))


def test_the_model_carries_the_preprocessing_of_this_package(repository: Path) -> None:
    for name in ("preprocess.py", "budget.py", "errors.py", "triton/jpeg/decoder.py"):
        copy = repository / "birds_jpeg" / "1" / "ncd_serve" / name
        assert copy.read_bytes() == (Path(ncd_serve.__file__).parent / name).read_bytes()


def test_the_checked_in_configuration_is_what_an_export_writes(repository: Path) -> None:
    written = (repository / "birds_jpeg" / "config.pbtxt").read_text()
    assert written.replace("birds", "ncd_global") == CHECKED_IN.read_text()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models" / "birds_jpeg").mkdir(parents=True)
    with pytest.raises(DataError, match="was not made by ncd-serve"):
        make_export(tmp_path / "models")
