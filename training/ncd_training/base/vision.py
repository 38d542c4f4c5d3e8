"""torchvision and timm, importable beside a CPU-only torch.

The package index has torchvision only as a CUDA build. Beside a CPU-only torch its compiled operators fail to load,
and the import then fails with "operator torchvision::nms does not exist", although transforms, datasets and models
need no compiled operator at all. Declaring the two schemas that the import registers fake kernels for is enough.
timm imports torchvision, so it comes from here too. Nothing else in the project imports either of them.
"""

from __future__ import annotations

import torch


def _declare_missing_operators() -> torch.library.Library | None:
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + schema)
    return library


# Never garbage-collected: a library's declarations disappear together with it.
_DECLARATIONS = _declare_missing_operators()

import timm  # noqa: E402
import torchvision  # noqa: E402
from timm.layers.pos_embed import resample_abs_pos_embed  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

__all__ = ["resample_abs_pos_embed", "timm", "torchvision", "v2"]
