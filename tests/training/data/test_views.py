from pathlib import Path

import torch
from ncd_training.config.schema import DataConfig
from ncd_training.data.views import BatchPlan, FileViews, ViewRequest, batches
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import Trunk
from ncd_training.model.map_cache import CachedViews, cache_bytes, cache_views

from tests.runs import SILENT

CPU = torch.device("cpu")


def data(**more: object) -> DataConfig:
    return DataConfig.model_validate(
        {"resolution": 32, "resize": 32, "augmentation": "glyph", "workers": 0, "cache_views": 3, **more}
    )


def images(glyphs: Path) -> list[Path]:
    return sorted((glyphs / "train").rglob("*.png"))[:10]


def test_an_epoch_is_one_pass_over_the_labelled_images() -> None:
    plan = BatchPlan(10, 4, 5, 3, seed=0)
    steps = [[request.index for request in batch] for batch in plan]
    assert len(steps) == len(plan) == 2
    assert sorted(index for batch in steps for index in batch[:5]) == list(range(10))
    assert all(10 <= index < 14 for batch in steps for index in batch[5:])
    assert {index for batch in steps for index in batch[5:]} == {10, 11, 12, 13}


def test_plans_are_the_same_for_an_epoch_and_differ_between_epochs() -> None:
    plan = BatchPlan(10, 4, 5, 3, seed=0)
    first, again = list(plan), list(plan)
    plan.epoch = 1
    assert first == again != list(plan)


def test_fewer_labelled_images_than_a_batch_are_cycled() -> None:
    (batch,) = BatchPlan(3, 5, 4, 2, seed=0)
    assert len(batch) == 6
    assert {request.index for request in batch[:4]} == {0, 1, 2}


def test_a_view_depends_on_its_seed_alone(glyphs: Path) -> None:
    views = FileViews(images(glyphs), data())
    first, second = views[ViewRequest(3, (11, 12))]
    assert first.shape == (3, 32, 32) and first.dtype == torch.uint8
    assert not torch.equal(first, second)
    torch.rand(5)
    assert torch.equal(views[ViewRequest(3, (12,))][0], second)


def test_cached_views_are_the_trunk_of_file_views_and_are_reused(glyphs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = Trunk(build_trunk("small_resnet", resolution=32))
    paths = images(glyphs)
    cached = cache_views(trunk, paths, data(), folder=tmp_path, progress=SILENT)
    (file,) = tmp_path.iterdir()
    assert cache_bytes(trunk, len(paths), data().cache_views, data().resolution) == file.stat().st_size - 128
    made = file.stat().st_mtime_ns
    cache_views(trunk, paths, data(), folder=tmp_path, progress=SILENT)
    assert file.stat().st_mtime_ns == made
    first, second = cached.__getitems__([ViewRequest(i, (i, i)) for i in range(4)])
    assert first.shape == second.shape == (4, *trunk(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape[1:])
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_any_change_makes_a_new_cache(glyphs: Path, tmp_path: Path) -> None:
    trunk = Trunk(build_trunk("small_resnet", resolution=32))
    paths = images(glyphs)

    def cache(number: int, **more: object) -> None:
        settings = data(**more)
        cache_views(trunk, paths[:number], settings, folder=tmp_path, progress=SILENT)

    cache(4)
    cache(5)
    cache(4, cache_views=2)
    trunk.stages[0][0].weight.data += 1
    cache(4)
    assert len(list(tmp_path.iterdir())) == 4


def test_batches_for_a_gpu_are_in_pinned_memory(glyphs: Path, tmp_path: Path) -> None:
    trunk = Trunk(build_trunk("small_resnet", resolution=32))
    cached = cache_views(trunk, images(glyphs), data(), folder=tmp_path, progress=SILENT)
    plan = BatchPlan(6, 4, 3, 2, seed=0)
    for views in (FileViews(images(glyphs), data()), cached):
        assert batches(views, plan, workers=0, device=torch.device("cuda")).pin_memory
        assert not batches(views, plan, workers=0, device=CPU).pin_memory


def test_both_kinds_of_views_come_in_the_plan_s_order(glyphs: Path, tmp_path: Path) -> None:
    trunk = Trunk(build_trunk("small_resnet", resolution=32))
    paths = images(glyphs)
    cached = cache_views(trunk, paths, data(), folder=tmp_path, progress=SILENT)
    plan = BatchPlan(6, 4, 3, 2, seed=0)
    for views in (FileViews(paths, data()), cached):
        shapes = [[len(view) for view in step] for step in batches(views, plan, workers=0, device=CPU)]
        assert shapes == [[5, 5], [5, 5]]
    assert isinstance(cached, CachedViews)
