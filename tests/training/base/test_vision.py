import subprocess
import sys

import pytest
import torch


def imported(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_torchvision_and_timm_work_through_the_fix() -> None:
    code = (
        "from ncd_training.base.vision import timm, torchvision, v2;"
        "torchvision.models.resnet18(); timm.create_model('tf_efficientnet_lite0'); v2.RandomResizedCrop(8)"
    )
    done = imported(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="the CUDA build of torch needs no fix")
def test_the_fix_is_still_needed() -> None:
    """When this fails, torchvision imports by itself: remove the fix."""
    assert "torchvision::nms" in imported("import torchvision").stderr
