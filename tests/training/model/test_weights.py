"""Weights of every format reach the trunk and the tail; whatever is no such file is refused with a reason."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.base.run_dir import RunDir
from ncd_training.base.vision import timm, torchvision
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.model.backbone import build_trunk
from ncd_training.model.networks import CifarResNet
from ncd_training.model.trunk import TrunkParts
from ncd_training.model.weight_files import read_weights
from ncd_training.model.weights import initial_trunk, load_weights, settle
from ncd_training.run import train as training
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from ncd_serve.errors import DataError, UsageError
from tests.runs import SILENT, again, ready

QUIET = Console(quiet=True)
LITE0 = Path("/work/shared/weights/tf_efficientnet_lite0.safetensors")
State = dict[str, Tensor]


def shaken(network: nn.Module) -> nn.Module:
    """Batch norm that does something, and position embeddings that differ."""
    torch.manual_seed(3)
    for name, tensor in network.state_dict().items():
        if name.endswith(("running_mean", "running_var", "bias", "pos_embed", "cls_token")):
            tensor.copy_(torch.rand_like(tensor) * 0.5 + 0.25)
    return network.eval()


def features(parts: TrunkParts, images: Tensor) -> Tensor:
    """The embedding of trunk and tail in one piece."""
    with torch.no_grad():
        return parts.tail.eval()(parts.frozen.eval()(images)).embedding


def images(size: int) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def below(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def moco(state: State) -> dict[str, Any]:
    query = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    head = {"fc.0.weight": torch.rand(4, 4), "fc.2.weight": torch.rand(2, 4)}
    key = {name: torch.rand_like(tensor.float()) for name, tensor in query.items()}
    joined = {**below("encoder_q.", {**query, **head}), **below("encoder_k.", {**key, **head}), "queue": torch.rand(3)}
    return {"epoch": 800, "arch": "resnet50", "state_dict": below("module.", joined), "optimizer": {"state": {}}}


def dino(state: State) -> dict[str, Any]:
    head = {"head.mlp.0.weight": torch.rand(2, 2)}
    backbone = {**below("backbone.", state), **head}
    noise = {name: torch.rand_like(tensor) for name, tensor in backbone.items()}
    settings = Namespace(arch="vit_small", patch_size=16, lr=0.0005)
    return {"student": below("module.", noise), "teacher": backbone, "epoch": 100, "args": settings}


@pytest.mark.parametrize("trunk", ["resnet18", "resnet50"])
@pytest.mark.parametrize(
    ("wrap", "format_"),
    [(lambda state: state, "torchvision"), (moco, "MoCo v2"), (lambda state: {"state_dict": state}, "torchvision")],
)
def test_resnets(trunk: str, wrap: Callable[[State], Any], format_: str, tmp_path: Path) -> None:
    network = shaken(getattr(torchvision.models, trunk)(weights=None))
    torch.save(wrap(network.state_dict()), tmp_path / "file.pth")
    parts = build_trunk(trunk, resolution=64)
    report = load_weights(parts, tmp_path / "file.pth")
    network.fc = nn.Identity()
    torch.testing.assert_close(features(parts, images(64)), network(images(64)).detach())
    assert (report.file.format, report.unused[0][:3]) == (format_, "fc.")
    assert f"{format_} weights: {report.matched} of {report.matched} tensors from" in report.line
    assert report.matched == {"resnet18": 100, "resnet50": 265}[trunk]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_rotnet(prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = shaken(CifarResNet()).state_dict()
    torch.save(
        below(prefix, {**state, "linear.weight": torch.rand(4, 512), "linear.bias": torch.rand(4)}), tmp_path / "r"
    )
    parts = build_trunk("cifar_resnet18", resolution=32)
    report = load_weights(parts, tmp_path / "r")
    assert report.file.format == "RotNet"
    assert report.unused == ["linear.weight", "linear.bias"]
    assert all(torch.equal(state[name], tensor) for name, tensor in parts.network.state_dict().items())


@pytest.mark.parametrize("wrapper", ["safetensors", "model", "model_ema", "state_dict"])
def test_efficientnet(wrapper: str, tmp_path: Path) -> None:
    network: Any = shaken(timm.create_model("tf_efficientnet_lite0"))
    file = tmp_path / "file"
    if wrapper == "safetensors":
        save_file(network.state_dict(), file)
    else:
        torch.save({wrapper: network.state_dict(), "epoch": 3}, file)
    parts = build_trunk("efficientnet_lite0", resolution=64)
    report = load_weights(parts, file)
    expected = network.forward_head(network.forward_features(images(64)), pre_logits=True)
    torch.testing.assert_close(features(parts, images(64)), expected.detach())
    assert (report.file.format, set(report.unused)) == ("timm", {"classifier.weight", "classifier.bias"})


@pytest.mark.skipif(not LITE0.exists(), reason=f"{LITE0} is not on this machine")
def test_real_efficientnet_weights() -> None:
    parts = build_trunk("efficientnet_lite0", resolution=96)
    assert load_weights(parts, LITE0).matched == 245
    assert 0 < float(features(parts, images(96)).mean()) < 10


@pytest.mark.parametrize("resolution", [224, 96])
@pytest.mark.parametrize(
    ("wrap", "format_"),
    [
        (lambda state: {**state, "head.weight": torch.rand(3, 384)}, "timm"),
        (lambda state: state, "DINO"),
        (dino, "DINO"),
    ],
)
def test_transformers(wrap: Callable[[State], Any], format_: str, resolution: int, tmp_path: Path) -> None:
    network: Any = shaken(timm.create_model("vit_small_patch16_224", num_classes=0))
    torch.save(wrap(network.state_dict()), tmp_path / "file.pth")
    parts = build_trunk("vit_small", resolution=resolution)
    report = load_weights(parts, tmp_path / "file.pth")
    assert report.file.format == format_
    # timm's own way to another resolution.
    network.set_input_size((resolution, resolution))
    expected = network.forward_features(images(resolution))[:, 0].relu().detach()
    torch.testing.assert_close(features(parts, images(resolution)), expected, rtol=1e-4, atol=1e-4)


def test_a_run_of_our_own(tiny_run: Path) -> None:
    run = RunDir.open(tiny_run)
    state = training.load_state(again(run), run.checkpoint).model.eval()
    pictures = images(32) * 255
    for path in (tiny_run, run.checkpoint):
        parts, report = initial_trunk(run.config(), weights=path)
        assert report is not None and report.file.format == "ncd-serve run" and report.unused == []
        expected = state.branches[0].tail(state.trunk(pictures)).embedding.detach()
        normalised = (pictures / 255 - torch.tensor(parts.mean).view(3, 1, 1)) / torch.tensor(parts.std).view(3, 1, 1)
        torch.testing.assert_close(features(parts, normalised), expected)


def test_the_first_name_and_shape_of_a_misfit_and_the_trunk_it_fits(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "file.pth")
    with pytest.raises(DataError) as caught:
        load_weights(build_trunk("resnet50", resolution=64), tmp_path / "file.pth")
    text = str(caught.value)
    assert "of 265 tensors match" in text and "missing: layer1.0.conv3.weight" in text
    assert "format torchvision: conv1.weight [64, 3, 7, 7]" in text
    assert caught.value.hint == "use the backbone that the file fits: --backbone resnet18"


def test_a_file_that_fits_nothing(tmp_path: Path) -> None:
    save_file({"words": torch.rand(3, 2)}, tmp_path / "words.safetensors")
    with pytest.raises(DataError, match=r"0 of 85 tensors match.*format unknown: words \[3, 2\]") as caught:
        load_weights(build_trunk("cifar_resnet18", resolution=32), tmp_path / "words.safetensors")
    assert (caught.value.hint or "").startswith("name its backbone with --backbone")


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("plain", [False, True])
def test_pickled_code_is_not_run(plain: bool, tmp_path: Path) -> None:
    file, target = tmp_path / "evil.pth", tmp_path / "created"
    content = {"conv1.weight": torch.rand(2), "evil": Evil(target)}
    if plain:
        file.write_bytes(pickle.dumps(content["evil"], protocol=2))
    else:
        torch.save(content, file)
    with pytest.raises(DataError, match=r"contains code \(getattr\), which was not run") as caught:
        read_weights(file)
    assert not target.exists()
    assert "safetensors" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page"),
        (b"\n  <html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
        (b"just words, for a while", "is damaged or not a file of weights"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{broken header!!", "is damaged"),
    ],
)
def test_what_is_no_weights(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.pth").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_weights(tmp_path / "file.pth")
    assert caught.value.hint


def test_a_trunk_that_does_not_exist_is_named_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match="unknown backbone 'resnet5'"):
        settle(resolve_config(overrides={"model.backbone": "resnet5"}), images=10, progress=SILENT)


@pytest.mark.parametrize(("side", "resolution"), [(None, 224), (300, 224), (32, 128), (9, 64)])
def test_images_are_enlarged_at_most_four_times(side: int | None, resolution: int) -> None:
    config = resolve_config(recipes=["own-images"], overrides={"model.weights": "none"})
    assert settle(config, images=10, progress=SILENT, side=side).data.resolution == resolution


def test_missing_files_and_other_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no weights at"):
        read_weights(tmp_path / "nowhere.pth")
    with pytest.raises(DataError, match="a folder without weights"):
        read_weights(tmp_path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pth"
    state = {"conv1.weight": torch.rand(100), "layer1.0.conv1.weight": torch.rand(100)}
    if kind == "safetensors":
        save_file(state, file)
    else:
        torch.save(state, file, _use_new_zipfile_serialization=kind == "zip")
    whole = file.read_bytes()
    for length in range(9, len(whole) - 1, 37):
        file.write_bytes(whole[:length])
        # Half a name is a name that is not allowed.
        with pytest.raises(DataError, match=r"is damaged|contains code"):
            read_weights(file)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(DataError, match="holds a list, not weights"):
        read_weights(tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(DataError, match="holds no weights, only epoch"):
        read_weights(tmp_path / "empty.pth")


def glyphs_config(glyphs: Path, tiny_settings: list[str], **more: Any) -> TrainConfig:
    from ncd_training.config.resolve import parse_override

    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    return resolve_config(recipes=["glyphs"], overrides={"data.root": str(glyphs), **settings, **more})


def test_a_run_goes_on_without_its_weight_file(
    glyphs: Path, tiny_settings: list[str], tiny_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "start.safetensors"
    file.write_bytes(RunDir(tiny_run).checkpoint.read_bytes())
    more = {"model.weights": str(file), "rotations.epochs": 0, "optim.epochs": 1}
    prepared = ready(glyphs_config(glyphs, tiny_settings, **more))
    run = RunDir.create(tmp_path / "run", prepared.config)
    training.train(prepared, run, progress=SILENT)
    file.unlink()
    state = training.load_state(again(run), run.checkpoint)
    start = training.load_state(again(RunDir(tiny_run)), RunDir(tiny_run).checkpoint)
    trunk, expected = (one.model.trunk.state_dict() for one in (state, start))
    assert all(torch.equal(trunk[name], expected[name]) for name in trunk if "num_batches" not in name)
    facts = run.read_summary().weights
    assert facts and (facts.file, facts.format, len(facts.sha256)) == ("start.safetensors", "ncd-serve run", 64)


def test_normalisation_can_be_told(tmp_path: Path) -> None:
    config = resolve_config(
        recipes=["glyphs"],
        overrides={
            "model.mean": [0.1, 0.2, 0.3],
            "model.std": [0.4, 0.5, 0.6],
            "model.backbone": "resnet18",
            "data.resolution": 64,
        },
    )
    parts, report = initial_trunk(config, weights=None)
    assert (parts.mean, parts.std, report) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), None)


def bomb(target: Path) -> None:
    """A file of torch.save whose tensor is packed: 100 kB that unpack to 100 MB."""
    plain = target.with_suffix(".plain")
    torch.save({"conv1.weight": torch.zeros(25_000_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    plain.unlink()


def circle() -> dict[str, object]:
    content: dict[str, object] = {}
    content["model"] = content
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"pos_embed": torch.zeros(1).expand(1, 100_000_001, 384)}, "larger than its data"),
        ({"w": torch.zeros(3).to_sparse()}, "not a dense tensor"),
        ({"w": torch.zeros(3, dtype=torch.complex64)}, "not a dense tensor"),
        ({"model.trunk.mean": torch.zeros(5), "model.trunk.std": torch.ones(3)}, "not of three channels"),
        ({"model.trunk.mean": torch.zeros(3)}, "is damaged"),
        (circle(), "recursion"),
    ],
)
def test_weights_made_to_hurt_are_refused(tmp_path: Path, content: object, reason: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(DataError, match=reason):
        read_weights(tmp_path / "w.pth")


def test_facts_of_safetensors_are_checked(tmp_path: Path) -> None:
    for number, moments in enumerate(({}, {"mean": "[1]", "std": "[1]"}, {"mean": "x", "std": "y"})):
        target = tmp_path / f"{number}.safetensors"
        save_file({"w": torch.zeros(3)}, target, metadata={"method": "moco", "trunk": "resnet18", **moments})
        with pytest.raises(DataError, match="is damaged"):
            read_weights(target)


def test_packed_weights_are_refused_before_they_grow(tmp_path: Path) -> None:
    bomb(tmp_path / "bomb.pth")
    with pytest.raises(DataError, match="is packed: it would take 100,0"):
        read_weights(tmp_path / "bomb.pth")
