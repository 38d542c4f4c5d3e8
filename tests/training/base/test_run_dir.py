"""Run directories without a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from ncd_training.base.run_dir import RunDir

from ncd_serve.errors import UsageError


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.held(), pytest.raises(UsageError, match="is being trained by another process"), RunDir(tmp_path).held():
        pass
    with run.held():
        pass
