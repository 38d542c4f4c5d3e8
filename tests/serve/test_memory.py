"""Peak memory is a process's own, whatever the process that started it holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ncd_serve import memory
from ncd_serve.memory import peak_memory

HELD = 500 * 10**6
TELL = "from ncd_serve.memory import peak_memory; print(peak_memory())"


@pytest.fixture
def large_parent() -> np.ndarray:
    """500 MB, written to, so that the system has really given them."""
    return np.ones(HELD, np.uint8)


@pytest.mark.usefixtures("large_parent")
def test_a_small_child_of_a_large_parent_is_small() -> None:
    assert peak_memory() > HELD
    said = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert 5e6 < int(said.stdout) < HELD / 5


@pytest.mark.usefixtures("large_parent")
def test_another_process_is_asked_by_its_number() -> None:
    waits = "import sys; held = b'x' * 50_000_000; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 50e6 < peak_memory(child.pid) < HELD / 5
    assert peak_memory(child.pid) == 0


def test_without_proc_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROCESSES", Path("/nowhere"))  # there is no other way to be without /proc
    assert peak_memory() > 5e6
    assert peak_memory(os.getpid()) == 0
