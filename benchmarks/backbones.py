"""Cost of backbones on this CPU, one thread: frozen trunk in torch and in ONNX Runtime, step from the cache, its size.

    ../shared/tools/quiet .venv/bin/python benchmarks/backbones.py
    .venv/bin/python benchmarks/backbones.py --cuts    # table of docs/howto/backbones.md

`limit` is the same step on a batch that is in memory already. Exits with 1 if a step from the cache has less than
0.9 of its speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import training_speed
from ncd_training.base.vision import timm
from ncd_training.model.cut import cut_network
from ncd_training.model.map_cache import view_bytes
from rich.console import Console
from rich.table import Table
from training_speed import build, draw_photos, measure_form, seconds_of

NETWORKS = {
    "efficientnet_lite0": 224,
    "resnet50": 224,
    "convnext_tiny": 224,
    "vit_small_patch16_224": 224,
    "vit_small_patch14_reg4_dinov2": 224,
}
IMAGES, CALLS, LEAST_SHARE = 4, 3, 0.9
# One network of each family, for the table of cuts; sizes are those that they were pretrained with.
CUTS = """
resnet18 resnetv2_50 resnest14d seresnet18 regnetx_002 repvgg_a0 densenet121 vgg11 tf_efficientnet_lite0
mobilenetv3_small_050 mobilenetv4_conv_small convnext_atto convnextv2_atto nfnet_l0 poolformer_s12 caformer_s18
edgenext_xx_small mobilevit_xxs ghostnetv2_100 hgnetv2_b0 focalnet_tiny_srf fastvit_t8 repvit_m0_9 rexnet_100 dla34
vovnet39a starnet_s1 mambaout_femto inception_next_atto davit_tiny pvt_v2_b0 efficientformerv2_s0 tiny_vit_5m_224
swin_tiny_patch4_window7_224 swinv2_cr_tiny_ns_224 maxvit_pico_rw_256 coatnet_nano_rw_224 levit_128s mixer_s32_224
vit_tiny_patch16_224 vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3 vit_base_patch16_siglip_224
vit_pe_core_tiny_patch16_384 eva02_tiny_patch14_224 beit_base_patch16_224 deit_tiny_distilled_patch16_224 hiera_tiny_224
xcit_nano_12_p8_224 cait_xxs24_224 crossvit_tiny_240 mvitv2_tiny twins_svt_small
"""


def measure(name: str, form: str, folder: Path) -> dict[str, float]:
    """Return seconds per image of one form, and the bytes of a cached view."""
    training_speed.SIZES.update(NETWORKS)
    if form in ("cached", "limit"):
        return measure_form(name, form, folder)
    torch.set_num_threads(1)
    trunk, side = build(name, plain=False).model.trunk, NETWORKS[name]
    if form == "torch":
        trunk.in_onnx = None
    images = torch.zeros(IMAGES, 3, side, side, dtype=torch.uint8)
    trunk.maps(images)
    best = min(seconds_of(lambda: trunk.maps(images)) for _ in range(CALLS))
    return {"seconds": best / IMAGES, "bytes": view_bytes(trunk, side)}


def by_form(name: str, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every form in a process of its own."""
    forms = ("torch", "onnx", "cached", "limit")
    commands = {form: [sys.executable, __file__, "--measure", name, form, str(folder)] for form in forms}
    return {
        form: json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for form, command in commands.items()
    }


def print_cuts() -> None:
    """Print where each family is cut, as Markdown."""
    warnings.simplefilter("ignore")
    print("| network | trained | frozen weights | trained weights |\n|---|---|---|---|")
    for name in CUTS.split():
        network: Any = timm.create_model(name, num_classes=0)
        parts = cut_network(network, resolution=network.pretrained_cfg["input_size"][1])
        frozen, trained = (
            sum(weight.numel() for weight in module.parameters()) / 1e6 for module in (parts.frozen, parts.tail)
        )
        print(f"| `{name}` | {parts.cut} | {frozen:.1f} M | {trained:.1f} M |", flush=True)


def main() -> None:
    """Print the table; exit code 1 if a step from the cache is too far from its limit."""
    columns = ("backbone", "trunk, torch", "trunk, ONNX Runtime", "step from the cache", "of the limit", "kB a view")
    table = Table(*columns, title="ms an image, one thread")
    missed = False
    with TemporaryDirectory() as folder:
        draw_photos(Path(folder))
        for name, side in NETWORKS.items():
            figures = by_form(name, Path(folder))
            share = figures["limit"]["seconds"] / figures["cached"]["seconds"]
            missed |= share < LEAST_SHARE
            cells = [f"{1000 * figures[form]['seconds']:.1f}" for form in ("torch", "onnx", "cached")]
            table.add_row(f"{name} {side} px", *cells, f"{share:.2f}", f"{figures['torch']['bytes'] / 1000:.0f}")
    Console(width=120).print(table)
    sys.exit(missed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], Path(sys.argv[4]))))
    elif sys.argv[1:2] == ["--cuts"]:
        print_cuts()
    else:
        main()
