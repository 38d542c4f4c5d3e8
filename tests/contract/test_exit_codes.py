"""A user's mistakes end in `error:` and `hint:` and the documented code, never in a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ncd_serve import errors
from ncd_serve.cli import app


def assert_kind(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert "Traceback" not in text
    for word in words:
        assert word in text.replace("\n", " "), text


def test_the_codes_are_the_documented_ones() -> None:
    codes = {kind.__name__: kind.exit_code for kind in errors.NcdError.__subclasses__()}
    assert codes == {
        "UsageError": 2,
        "DataError": 3,
        "ExportMismatchError": 4,
        "ServerError": 5,
        "MissingExtraError": 6,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("trian",), 2, ("error: no command 'trian' hint: did you mean 'train'?",)),
        (("train", "--epoch", "3"), 2, ("error: no such option: --epoch hint: did you mean --epochs?",)),
        (("train", "--epochs"), 2, ("error: option '--epochs' requires an argument hint: see ncd-serve train --help",)),
        (("train", "--epochs", "-3"), 2, ("error: --epochs must be at least 0 hint: see ncd-serve train --help",)),
        (("train", "--device", "gpu"), 2, ("error: --device: 'gpu' is not one of 'auto', 'cpu', 'cuda' hint:",)),
        (("serve", "--grpc-port", "x"), 2, ("error: --grpc-port must be a whole number hint: see ncd-serve serve",)),
        (("name", "apply"), 2, ("error: missing argument 'NAMES' hint: see ncd-serve name apply --help",)),
        (("train", "--dataset", "glyphs", "--novel-classes", "many"), 2, ("must be a whole number or 'auto'", "hint:")),
        (("train", "--labeled", "here", "--unlabeled", "there"), 3, ("no such folder", "hint: check the path")),
        (("train",), 2, ("error: no images to train on", "hint:")),
        (("train", "--dataset", "cub20"), 2, ("unknown dataset 'cub20'", "did you mean 'cub200'?")),
        (("train", "--dataset", "cub200"), 3, ("dataset 'cub200' is not at", "hint: unpack")),
        (("train", "--dataset", "glyphs", "--set", "optim.epoch=3"), 2, ("optim.epoch", "did you mean 'epochs'?")),
        (("train", "--dataset", "glyphs", "--recipe", "glyhps"), 2, ("did you mean 'glyphs'?",)),
        (("train", "--labelled", "here", "--unlabelled", "there"), 3, ("no such folder", "hint: check the path")),
        (
            ("train", "--labelled", "here", "--recipe", "cub200"),
            2,
            ("no unlabelled images to discover classes in", "hint: add --unlabelled DIR"),
        ),
        (("train", "--dataset", "cub200", "--manifest", "x.csv"), 2, ("cannot be mixed",)),
        (("train", "--manifest", "x.csv"), 3, ("cannot read", "x.csv")),
        (("train", "--dataset", "cifar10"), 3, ("cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz")),
        (("train", "--resume", "nowhere"), 3, ("is not a run directory",)),
        (("train", "--resume", "nowhere", "--dry-run"), 2, ("--dry-run is for a new run", "hint: drop --resume")),
        (("train", "--resume", "nowhere", "--set", "optim.epochs=9"), 2, ("the run's own settings", "hint: drop")),
        (("train", "--dataset", "glyphs", "--weights", "no.pth"), 3, ("no weights at", "hint: check the path")),
        (("pretrain",), 2, ("error: no images to train on", "hint:")),
        (("pretrain", "--dataset", "glyphs", "--method", "simclr"), 2, ("pretrain.method", "'rotnet' or 'moco'")),
        (("pretrain", "--images", "nowhere"), 3, ("no such folder", "hint: check the path")),
        (("pretrain", "--resume", "nowhere"), 3, ("is not a run directory", "ncd-serve pretrain makes one")),
        (("pretrain", "--resume", "nowhere", "--epochs", "9"), 2, ("the run's own settings", "hint: drop")),
        (("evaluate", "nowhere"), 3, ("is not a run directory",)),
        (("export", "nowhere"), 3, ("is not a run directory",)),
        (("serve", "--repository", "nowhere"), 3, ("nowhere", "hint:")),
        (("assign", "x.jpg", "--bundle", "nowhere"), 3, ("no such file or folder: x.jpg",)),
        (("query", ".", "--url", "http://h:1"), 3, ("no images in",)),
        (("query", "x.jpg", "--out", "rows.xlsx"), 2, ("rows.xlsx", ".parquet")),
        (("query", "x.jpg", "--resume"), 2, ("--resume needs the --out", "hint: add --out FILE")),
        (("query", "https://h/x.jpg"), 2, ("https://h/x.jpg is a URL", "--allow-urls")),
        (("query", "*.jpg"), 3, ("no such file or folder: *.jpg",)),
        (("query", __file__, "--url", "ftp://h:1"), 2, ("'ftp://h:1' is not a server address", "grpc://HOST:PORT")),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["ncd-serve", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert_kind(subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capfd.readouterr()), code, *words)
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_a_dataset_folder_without_images(ncd: Any, tmp_path: Path) -> None:
    (tmp_path / "known" / "a").mkdir(parents=True)
    (tmp_path / "pile").mkdir()
    done = ncd("train", "--labelled", "known", "--unlabelled", "pile", "--novel-classes", 2, cwd=tmp_path)
    assert_kind(done, 3, "no images in class folders below", "hint:")


def test_query_without_a_server(ncd: Any, glyphs: Path) -> None:
    done = ncd("query", glyphs / "test" / "E", "--url", "grpc://127.0.0.1:1")
    assert_kind(done, 5, "no Triton server answers at 127.0.0.1:1", "hint: start one with: ncd-serve serve")


def test_serve_on_a_port_in_use(ncd: Any, bundle: Path, repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_kind(ncd("serve", "--repository", repository, "--grpc-port", port), 5, f"127.0.0.1:{port}", "hint:")


def test_serve_without_a_triton_binary(bundle: Path, repository: Path, tmp_path: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import sys\nsys.modules['pytriton'] = None\n")
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "ncd_serve", "serve", "--repository", str(repository)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert_kind(done, 6, "none is installed", "pip install 'ncd-serve[triton]'")


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    program = "import ncd_serve.__main__, os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    program = "import sys; before = {*sys.modules}; import ncd_serve; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["ncd_serve"], done


@pytest.mark.parametrize("made", [ImportError("initialization failed"), errors.DataError("cannot be loaded")])
def test_what_packages_make_of_ctrl_c_is_an_interruption(made: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise made from error

    monkeypatch.setattr(app, "app", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_training_can_be_resumed(
    sent: signal.Signals, code: int, ncd: Any, glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = [*tiny_settings, "--set", "optim.epochs=1000"]
    command = ["train", "--dataset", "glyphs", "--data-root", str(glyphs), "--out", str(run), *settings]
    with subprocess.Popen(
        [sys.executable, "-m", "ncd_serve", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(sent)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == code, messages
    assert "Traceback" not in messages
    assert f"ncd-serve train --resume {run}" in messages.replace("\n", "")
    assert [path.name for path in run.rglob(".*")] == [], "no half-written file"
