"""The training half of `doctor --self-test`: what it lets pass, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ncd_training.base.precision import Precision
from ncd_training.run.self_test import FLOAT32, MIXED, SmallRun, Trained, compare

from ncd_serve.errors import MissingExtraError, NcdError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp("self-test"))


@pytest.fixture(scope="module")
def yardstick(run: SmallRun) -> Trained:
    return run.train(CPU)


def test_the_same_steps_twice_are_the_same(run: SmallRun, yardstick: Trained) -> None:
    assert len(yardstick.terms) == 3 and "distillation" in yardstick.terms[-1]
    assert compare(run.train(CPU), yardstick, FLOAT32) == (
        "loss terms differ by 0.0e+00 (limit 0.001), weight updates by 0.0e+00 (limit 0.02)"
    )


def test_a_step_on_the_cpu_is_checked_with_its_limits(run: SmallRun) -> None:
    steps = dict(run.steps())
    assert list(steps) == ["float32", "mixed precision", "compiled"]
    assert steps["float32"]().startswith("cpu: loss terms differ by 0.0e+00 (limit 0.001)")
    with pytest.raises(MissingExtraError, match="needs an NVIDIA GPU"):
        steps["mixed precision"]()


def test_an_update_that_is_wrong_in_one_weight_is_a_problem(yardstick: Trained) -> None:
    changed = {name: update.clone() for name, update in yardstick.updates.items()}
    first = next(iter(changed.values()))
    first[(0,) * first.dim()] += 0.05 * torch.cat([update.flatten() for update in changed.values()]).norm()
    with pytest.raises(NcdError, match=r"weight updates by 5.0e-02 \(limit 0.02\)") as error:
        compare(Trained(yardstick.terms, changed), yardstick, FLOAT32)
    assert error.value.exit_code == 1 and "CUDA_VISIBLE_DEVICES=" in (error.value.hint or "")


@pytest.mark.parametrize("wrong", [1.01, float("nan"), float("inf")])
def test_a_wrong_loss_term_is_a_problem(yardstick: Trained, wrong: float) -> None:
    terms = [*yardstick.terms[:-1], {**yardstick.terms[-1]}]
    terms[-1]["cross_entropy"] *= wrong
    with pytest.raises(NcdError, match="loss terms differ"):
        compare(Trained(terms, yardstick.updates), yardstick, FLOAT32)


def test_weights_that_are_not_numbers_are_a_problem(yardstick: Trained) -> None:
    lost = {name: update * float("nan") for name, update in yardstick.updates.items()}
    with pytest.raises(NcdError, match="weight updates by inf"):
        compare(Trained(yardstick.terms, lost), yardstick, MIXED)


@pytest.mark.parametrize(
    ("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bfloat16", "float16"]
)
def test_fewer_bits_are_within_their_limits_and_beyond_those_of_float32(
    dtype: torch.dtype, scaled: bool, run: SmallRun, yardstick: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A GPU would choose them; a CPU computes them as well when it is told to.
    precision = Precision(dtype, torch.amp.GradScaler("cpu", enabled=scaled))
    monkeypatch.setattr(Precision, "on", lambda device, *, mixed: precision)
    found = run.train(CPU, mixed=True)
    compare(found, yardstick, MIXED)
    with pytest.raises(NcdError):
        compare(found, yardstick, FLOAT32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, about its other parts
def test_a_missing_compiler_is_no_problem(run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",), "compile_threads": 1}),
        pytest.raises(MissingExtraError, match=r"torch\.compile does not work here: .*/nowhere/g\+\+") as error,
    ):
        dict(run.steps())["compiled"]()
    assert "C++ compiler" in (error.value.hint or "")
