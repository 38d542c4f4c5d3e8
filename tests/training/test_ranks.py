"""Two processes that train together must do what one does alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.ranks import Ranks
from ncd_training.run_dir import RunDir
from safetensors.torch import load_file

from ncd_serve.errors import UsageError


def launch(processes: int, *arguments: object) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *torchrun, "-m", "ncd_serve", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_train_like_one(glyphs: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    # Small steps: rounding differs between one sum and a sum of two halves, and large ones would let it grow.
    common = ("--dataset", "glyphs", "--data-root", glyphs, *tiny_settings, "--set", "optim.learning_rate=0.01")
    for processes in (1, 2):
        launch(processes, *common, "--out", tmp_path / str(processes))
    alone, together = (RunDir(tmp_path / n).read_metrics() for n in ("1", "2"))
    assert [row["epoch"] for row in together] == [1, 2]
    for one, two in zip(alone, together, strict=True):
        terms = {name: value for name, value in one.items() if name.startswith(("pairwise", "dist", "cross", "consis"))}
        assert len(terms) == 5
        assert {name: two[name] for name in terms} == pytest.approx(terms, rel=1e-3, abs=1e-6)
    weights = [load_file(tmp_path / n / "checkpoints" / "last.safetensors") for n in ("1", "2")]
    assert weights[0].keys() == weights[1].keys()
    banks = [name for name in weights[0] if name.startswith("objective.banks")]
    for name in (*banks, "model.branches.0.cluster_head.weight", "model.branches.1.known_head.weight"):
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)


def test_a_batch_is_dealt_out_evenly_or_refused() -> None:
    assert [Ranks(rank, 2).share([*"abcd"]) for rank in range(2)] == [["a", "c"], ["b", "d"]]
    Ranks(0, 2).check(192)
    with pytest.raises(UsageError, match="cannot be split over 5"):
        Ranks(0, 5).check(192)


def _norms_agree(rank: int, folder: str, results: Any) -> None:
    """In a process of its own: half of the images through GlobalBatchNorm, all of them through torch's."""
    import torch.distributed as dist
    from ncd_training.ranks import GlobalBatchNorm

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    images, plain = torch.randn(8, 3, 2, 2) * 3 + 1, torch.nn.BatchNorm2d(3)
    weights = torch.randn(8, 3, 2, 2)
    mine, own = GlobalBatchNorm(plain), images[rank::2].clone().requires_grad_()
    everything = images.clone().requires_grad_()
    answer, expected = mine(own), plain(everything)
    (answer * weights[rank::2]).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(answer, expected[rank::2]), (own.grad, everything.grad[rank::2]), (mine.running_var, plain.running_var)]
    results[rank] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    dist.destroy_process_group()


def test_batch_norm_sees_all_ranks(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_norms_agree, (str(tmp_path), results), nprocs=2)
        assert max(results.values()) < 1e-5
