"""Processes that train together must do what one does alone, whatever their number, and whichever of them dies."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.base import distributed as ranks
from ncd_training.base.distributed import Ranks
from ncd_training.base.processes import Launch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import parse_override, resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.model.backbone import build_trunk
from ncd_training.model.map_cache import cache_views
from ncd_training.objective.queues import FifoQueue
from ncd_training.run import train as training
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from ncd_serve.errors import UsageError
from tests.runs import SILENT, again, ready

QUIET = Console(quiet=True)
WATCHED = Path(__file__).with_name("watched_ranks.py")
# Torch takes seconds to import: one process does it, and those of the tests are forked from it.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["ncd_training.run.train"])


def make_config(glyphs: Path, tiny_settings: list[str], **more: Any) -> TrainConfig:
    # Small steps: rounding differs between one sum and a sum of parts, and large ones would let that grow.
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    own = {"data.root": str(glyphs), "optim.learning_rate": 0.001, "report.tsne_epochs": []}
    return resolve_config(recipes=["glyphs"], overrides={**own, **settings, **more})


def torchrun(processes: int, *arguments: object, fails: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """The real one, which ends or starts again all processes when one of them has failed."""
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WATCHED), "train", *map(str, arguments)]
    environment = os.environ | {"NCD_TEST_FAILS": fails}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def together(processes: int, work: Callable[..., None], *arguments: Any, **environment: str) -> bool:
    """Do `work` in so many processes, and say whether all of them came to an end. One that fails ends them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0", **environment}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    members = [
        SERVER.Process(target=member, args=({**shared, **sizes, "RANK": str(n), "LOCAL_RANK": str(n)}, work, arguments))
        for n in range(processes)
    ]
    for process in members:
        process.start()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and {process.exitcode for process in members} in ({None}, {None, 0}):
        time.sleep(0.05)
    for process in members:
        process.terminate()
        process.join()
    return not any(process.exitcode for process in members)


def member(environment: dict[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    work(*arguments)


def train(config: TrainConfig, folder: Path) -> None:
    """As the command does it."""
    import tests.training.base.watched_ranks  # noqa: F401  # steps are compared, and may fail

    launch = Launch.read()
    prepared = ready(config, launch=launch)
    begun = RunDir.of_this_job(folder, prepared.config, launch)
    run = begun or RunDir.create(folder, prepared.config, launch=launch)
    training.train(prepared, run, progress=SILENT, launch=launch)


def resume(folder: Path) -> None:
    import tests.training.base.watched_ranks  # noqa: F401  # steps are compared, and may fail

    run = RunDir.open(folder)
    training.train(again(run), run, progress=SILENT, launch=Launch.read())


@pytest.mark.slow
def test_a_run_may_go_on_with_any_number_of_processes(glyphs: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    config = make_config(glyphs, tiny_settings, **{"optim.epochs": 4})
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    assert together(1, train, config, whole.path)
    assert not together(1, train, config, parts.path, NCD_TEST_FAILS="0 1 kill")
    assert not together(2, resume, parts.path, NCD_TEST_FAILS="1 2 kill")
    assert [row["epoch"] for row in parts.read_metrics()] == [1, 2]
    failed = torchrun(4, "--resume", parts.path, fails="3 3 data")
    # Who failed says why, once, and torchrun says it again at the end; of those who lost it, there is nothing.
    before, _, summary = failed.stderr.partition("Root Cause")
    assert before.count("error: no images left\nhint: find more") == failed.stderr.count("error: ") == 1
    assert before.count("Traceback") == 1 and "exitcode  : 3" in summary and "no images left" in summary
    assert failed.stdout == "" and f"interrupted; resume with: ncd-serve train --resume {parts.path}" in before
    assert together(1, resume, parts.path)

    for one, other in zip(whole.read_metrics(), parts.read_metrics(), strict=True):
        terms = {name: one[name] for name in one if name.startswith(("pairwise", "dist", "cross", "consis"))}
        assert len(terms) == 5
        assert {name: other[name] for name in terms} == pytest.approx(terms, rel=1e-3, abs=1e-6)
    weights = [load_file(run.checkpoint) for run in (whole, parts)]
    assert weights[0].keys() == weights[1].keys()
    banks = [name for name in weights[0] if name.startswith("objective.banks")]
    for name in (*banks, "model.branches.0.cluster_head.weight", "model.branches.1.known_head.weight"):
        assert relative_error(weights[1][name], weights[0][name]) <= 1e-3, name


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor: of 32,768 entries, one may stand where rounding has grown more than anywhere else."""
    assert found.shape == expected.shape
    return float(
        torch.linalg.vector_norm(found.float() - expected.float()) / torch.linalg.vector_norm(expected.float())
    )


@pytest.mark.slow
def test_torchrun_starts_killed_processes_again(glyphs: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    config = make_config(glyphs, tiny_settings, **{"data.cache_views": 3})
    whole, killed, views = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed"), tmp_path / "views"
    job = {"TORCHELASTIC_RUN_ID": "job"}
    assert not together(2, train, config, whole.path, NCD_TEST_FAILS="0 -1 kill", **job)
    (unfinished,) = whole.cache.iterdir()
    assert unfinished.name.startswith(".") and not whole.checkpoint.exists()
    assert together(2, train, config, whole.path, **job)

    (tmp_path / "config.toml").write_text(config.to_toml())
    settings = ("--config", tmp_path / "config.toml", "--set", f"data.cache_dir={views}", "--out", killed.path)
    done = torchrun(2, *settings, fails="1 1 kill", restarts=1)
    assert done.returncode == 0 and done.stdout.count("run directory:") == 1, done.stderr
    assert f"resuming {killed.path} after epoch 1 of 2" in done.stderr.replace("\n", " ")
    assert killed.read_metrics() == whole.read_metrics()
    weights = [load_file(run.checkpoint) for run in (whole, killed)]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []

    prepared = again(killed)
    trunk, data = training.load_state(prepared, killed.checkpoint).model.trunk, prepared.config.data
    cache_views(trunk, prepared.manifest.images, data, folder=tmp_path / "alone", progress=SILENT)
    (alone,), (shared,) = (tmp_path / "alone").iterdir(), views.iterdir()
    assert alone.name == shared.name and alone.read_bytes() == shared.read_bytes()


def test_only_the_torchrun_that_began_a_run_goes_on_with_it(
    glyphs: Path, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, other = (make_config(glyphs, tiny_settings, **{"optim.seed": seed}) for seed in (0, 1))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert RunDir.of_this_job(tmp_path / "run", config, Launch.read()) is None
    for number, job in enumerate(("job", "none")):  # none is torchrun's own word; then its process counts
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        run = RunDir.create(tmp_path / str(number), config, launch=Launch.read())
        assert RunDir.of_this_job(run.path, config, Launch.read()) == run
        assert RunDir.of_this_job(run.path, other, Launch.read()) is None
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert RunDir.of_this_job(run.path, config, Launch.read()) is None
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        assert RunDir.of_this_job(run.path, config, Launch.read()) is None


def test_another_launcher_s_variables_do_not_make_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Launch.read() == Launch()


def test_a_batch_is_dealt_out_evenly_or_refused(glyphs: Path, tiny_settings: list[str]) -> None:
    assert [Ranks(rank, 2).share([*"abcd"]) for rank in range(2)] == [["a", "c"], ["b", "d"]]
    assert [Ranks(0, 6, rank, 3).local_part([*"abcde"]) for rank in range(3)] == [
        (0, ["a"]),
        (1, ["b", "c"]),
        (3, ["d", "e"]),
    ]
    with pytest.raises(UsageError, match="a batch of 32 images cannot be split over 5"):
        ready(make_config(glyphs, tiny_settings), launch=Launch(size=5))


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="torchrun started 4 processes, but this machine has 2 GPUs"):
        ranks.join(Launch(1, size=8, local_rank=1, local_size=4))


def test_ranks_of_an_earlier_start_are_not_waited_for() -> None:
    store, words = HashStore(), set()
    store.set("rank 1", "one that died")
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            (word,) = set(pool.map(lambda rank: ranks._start_prefix(store, rank, 3), range(3)))
        words.add(word)
    assert len(words) == 2


def _talk() -> None:
    """In a process of its own: every way of talking to the others."""
    joined = ranks.join(Launch.read())
    _set_pg_timeout(timedelta(seconds=1))  # so long may a step take, but not what the first rank does alone
    time.sleep(0 if joined.rank else 2)
    joined.wait()
    _set_pg_timeout(timedelta(minutes=1))
    assert joined.all_shares([f"{joined.rank}a", f"{joined.rank}b"][: 2 - joined.rank]) == ["0a", "1a", "0b"]
    assert joined.leaders(joined.rank) == 0
    joined.agree("the same")
    with pytest.raises(UsageError, match="different settings"):
        joined.agree(f"I am {joined.rank}")
    torch.manual_seed(joined.rank)
    layer = torch.nn.Linear(2, 2)
    joined.follow_leader(layer)
    torch.manual_seed(0)
    assert torch.equal(layer.weight, torch.nn.Linear(2, 2).weight)
    queue = FifoQueue(4, 1)
    queue.push(torch.ones(2 + joined.rank, 1))
    joined.follow_leader(queue)
    assert queue.filled.tolist() == [[1.0], [1.0]]
    _norms_agree(joined.rank)
    _counts_fit_into_float16()
    ranks.leave()
    ranks.join(Launch.read()).wait()  # for another run


def _norms_agree(rank: int) -> None:
    """Half of the images through GlobalBatchNorm, all of them through torch's."""
    torch.manual_seed(0)
    images, plain = torch.randn(8, 3, 2, 2) * 3 + 1, torch.nn.BatchNorm2d(3)
    weights = torch.randn(8, 3, 2, 2)
    mine, own = ranks.GlobalBatchNorm(plain), images[rank::2].clone().requires_grad_()
    everything = images.clone().requires_grad_()
    answer, expected = mine(own), plain(everything)
    (answer * weights[rank::2]).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(answer, expected[rank::2]), (own.grad, everything.grad[rank::2]), (mine.running_var, plain.running_var)]
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-5


def _counts_fit_into_float16() -> None:
    """48 images of each rank with 28 x 28 locations: 75,264 are more than float16 can count."""
    maps = torch.randn(48, 2, 28, 28, generator=torch.Generator().manual_seed(0)).add(1).half()
    mine, plain = ranks.GlobalBatchNorm(torch.nn.BatchNorm2d(2)), torch.nn.BatchNorm2d(2)
    answer, expected = mine(maps), plain(maps.float())
    assert answer.dtype == torch.float16
    torch.testing.assert_close(answer.float(), expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(mine.running_var, plain.running_var, atol=1e-4, rtol=0)


def test_ranks_talk_to_each_other_and_norms_see_them_all() -> None:
    assert together(2, _talk)


@pytest.mark.parametrize(("device", "norm"), [("cuda", torch.nn.SyncBatchNorm), ("cpu", ranks.GlobalBatchNorm)])
def test_norms_over_ranks_are_torch_s_own_on_cuda(device: str, norm: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    for trunk in ("small_resnet", "efficientnet_lite0"):  # the layers of the second, timm's, end in an activation
        tail = build_trunk(trunk, resolution=32).tail
        for tensor in tail.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape).add(0.5))
        replaced = deepcopy(tail)
        ranks.with_global_batch_norm(replaced, torch.device(device))
        layers = [module for module in replaced.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
        assert len(layers) >= 3 and all(isinstance(layer, norm) for layer in layers)
        state = replaced.state_dict()
        assert list(state) == list(tail.state_dict())
        assert all(torch.equal(tensor, state[name]) for name, tensor in tail.state_dict().items())
        # In eval mode no rank is asked, so that both can run here.
        maps = torch.randn(2, next(tail.parameters()).shape[1], 4, 4)
        torch.testing.assert_close(replaced.eval()(maps), tail.eval()(maps))
