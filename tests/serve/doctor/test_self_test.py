"""`doctor --self-test`: the real command, and parts that are missing, wrong or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ncd_serve.doctor.checks import Check
from ncd_serve.doctor.self_test import compare_answers, run_self_test, verdict
from ncd_serve.errors import NcdError
from tests.serve.small_models import SOURCE


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def replace_torch(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch for processes that are started."""
    folder.mkdir()
    (folder / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))


@pytest.mark.slow
def test_this_machine_trains_exports_and_serves_as_its_cpu_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ncd_serve", "doctor", "--self-test", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["what"]: check for check in json.loads(done.stdout) if check["group"] == "self-test"}
    assert [*checks][-1] == "verdict" and checks["verdict"]["verdict"] == "ok"
    for what in ("float32", "export", "onnxruntime cpu", *(["triton"] if SOURCE else [])):
        assert checks[what]["verdict"] == "ok"
    for what in ("float32", "onnxruntime cpu"):
        assert "(limit 0.0" in checks[what]["found"]
    assert all(check["verdict"] == "ok" or check["fix"] for check in checks.values())
    if SOURCE:
        assert checks["verdict"]["found"].startswith("this machine trains, exports and serves as the CPU does")
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {".ses"}  # which ONNX Runtime writes whenever it is imported


def test_without_torch_training_is_missing(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    replace_torch(tmp_path / "packages", absent, monkeypatch)
    training, last = run_self_test()
    assert (training.what, training.verdict, training.code) == ("training", "missing", 0)
    assert training.found == "this needs torch, which is not installed"
    assert training.fix == "pip install 'ncd-serve[train]'"
    assert (last.verdict, last.found) == ("missing", "nothing could be tested; not tested: training")
    assert list(temporary.iterdir()) == []


def test_a_crash_is_a_line_of_the_report(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import os, sys; print('driver is broken', file=sys.stderr, flush=True); os.abort()"
    replace_torch(tmp_path / "packages", crash, monkeypatch)
    crashed, last = run_self_test()
    assert (crashed.verdict, crashed.code) == ("problem", 1)
    assert crashed.found == "the process that trains and exports ended with code -6: driver is broken"
    assert (last.verdict, last.code) == ("problem", 1)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_self_test_leaves_nothing(temporary: Path) -> None:
    checks = run_self_test()
    assert next(checks).what == "float32"
    checks.close()  # type: ignore[attr-defined]
    assert list(temporary.iterdir()) == []


def make_answers(**changed: Any) -> dict[str, Any]:
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
    ids = probabilities.argmax(axis=1)
    return {"probabilities": probabilities, "embedding": np.full((2, 3), 50.0), "cluster_id": ids, **changed}


def test_answers_within_the_limit_are_told_with_it() -> None:
    found = make_answers(embedding=np.full((2, 3), 50.001))
    told = compare_answers(found, make_answers(), limit=1e-4, hint="")
    assert told == "answers for 2 images, which differ by 2.0e-05 (limit 0.0001)"


def test_answers_that_were_asked_for_twice_are_all_compared() -> None:
    twice = {name: np.concatenate([values, values]) for name, values in make_answers().items()}
    assert "differ by 0.0e+00" in compare_answers(twice, make_answers(), limit=1e-4, hint="")
    twice["probabilities"][3] += 0.01
    with pytest.raises(NcdError, match=r"not the same answers .* differ by 1.0e-02 \(limit 0.0001\)"):
        compare_answers(twice, make_answers(), limit=1e-4, hint="")


@pytest.mark.parametrize(
    "changed",
    [
        {"probabilities": np.array([[0.9, 0.1], [0.3, 0.7]], np.float32)},
        {"embedding": np.full((2, 3), np.nan)},
        {"cluster_id": np.array([1, 1])},
    ],
)
def test_wrong_answers_are_a_problem(changed: dict[str, Any]) -> None:
    with pytest.raises(NcdError) as error:
        compare_answers(make_answers(**changed), make_answers(), limit=1e-4, hint="use --device cpu")
    assert error.value.exit_code == 1 and error.value.hint == "use --device cpu"


def make_check(what: str, result: Literal["ok", "missing", "problem"], code: int = 0) -> Check:
    return Check("self-test", what, result, "", code=code)


def test_the_verdict_says_what_works_and_what_does_not() -> None:
    works = [make_check(what, "ok") for what in ("float32", "onnxruntime cpu")]
    assert verdict(works).found == "this machine trains and exports as the CPU does"
    partly = verdict([*works, make_check("triton", "missing")])
    assert partly.verdict == "ok"
    assert partly.found == "this machine trains and exports as the CPU does; not tested: triton"
    wrong = verdict([*works, make_check("mixed precision", "problem", 1), make_check("triton", "problem", 5)])
    assert (wrong.verdict, wrong.code) == ("problem", 1)
    assert wrong.found == "this machine does not compute as the CPU does: mixed precision, triton"
