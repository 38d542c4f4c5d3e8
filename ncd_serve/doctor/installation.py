"""Checks that `doctor` always makes: Python, packages, devices, Triton, disks and memory.

Each step is a name and a function that returns its finding. It raises MissingExtraError for a part that only some
commands need, and BrokenInstallationError or another NcdError for a problem.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, MissingExtraError, ServerError
from ncd_serve.runners import Device, open_session
from ncd_serve.triton import find_triton

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Step = tuple[str, Callable[[], str]]

FOR_DEVELOPERS = ("all", "dev", "docs")  # extras that no command needs
CHILD_SECONDS = 120  # torch on a slow disk
# y = x for one number: enough to see whether a provider starts.
TINY_MODEL = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a0808"
    "0112040a02080142040a001012"
)
ASK_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps([torch.__version__, torch.version.cuda, names]))
"""
ASK_STUB = "import platform, numpy, onnxruntime; print(platform.python_version(), numpy.__version__)"
SHARED_MEMORY = Path("/dev/shm")
MIN_DISK_BYTES, MIN_SHARED_BYTES, MIN_MEMORY_BYTES = 1e9, 64e6, 5e8


class BrokenInstallationError(MissingExtraError):
    """Part of the installation that is required or present, but does not work."""


def installation_steps() -> Iterator[Step]:
    """Yield checks that the installed packages are complete and work."""
    yield "python", _python
    yield "ncd-serve", partial(_packages, "")
    for extra in metadata("ncd-serve").get_all("Provides-Extra") or ():
        if extra not in FOR_DEVELOPERS:
            yield f"extra {extra}", partial(_packages, extra)
    yield "torch", _torch
    yield "onnxruntime", _onnxruntime
    yield "onnxruntime cuda", partial(_provider, Device.CUDA, "'onnxruntime-gpu[cuda,cudnn]'")
    yield "onnxruntime tensorrt", partial(_provider, Device.TENSORRT, "tensorrt")
    yield "triton", _triton
    yield "triton stub", _stub


def machine_steps() -> Iterator[Step]:
    """Yield checks of free space on disks and in memory."""
    yield "cores, memory", _cores_and_memory
    yield "working folder", partial(_room, Path.cwd(), "free some space, or use --out FOLDER on another disk")
    yield "temporary files", partial(_room, Path(tempfile.gettempdir()), "export TMPDIR=FOLDER on another disk")
    if SHARED_MEMORY.is_dir():
        yield "shared memory", _shared_memory


def _python() -> str:
    from packaging.specifiers import SpecifierSet

    supported, here = metadata("ncd-serve")["Requires-Python"], platform.python_version()
    if not SpecifierSet(supported).contains(here):
        raise BrokenInstallationError(
            f"{here} is not {supported}",
            hint=f"make an environment with a Python {supported}: python3.12 -m venv .venv",
        )
    return f"{here}, {sys.executable}"


def _packages(extra: str) -> str:
    """Return the packages of an extra, or with "" of the base, and their versions."""
    found, absent, unfit = [], [], []
    for wanted in _requirements(extra):
        try:
            present = version(wanted.name)
        except PackageNotFoundError:
            absent.append(wanted.name)
            continue
        found.append(f"{wanted.name} {present}")
        if not wanted.specifier.contains(present, prereleases=True):
            unfit.append(f"{wanted.name}{wanted.specifier}")
    listed = ", ".join([] if extra else [version("ncd-serve"), *found]) or ", ".join(found)
    if absent and extra:
        also = f" (installed: {listed})" if found else ""
        raise MissingExtraError(f"not installed: {', '.join(absent)}{also}", hint=f"pip install 'ncd-serve[{extra}]'")
    if absent or unfit:
        asked = " ".join(f"'{name}'" for name in (*absent, *unfit))
        raise BrokenInstallationError(f"needs {asked}; installed: {listed}", hint=f"pip install {asked}")
    return listed


def _requirements(extra: str) -> list[Requirement]:
    """Return the requirements of this package on this machine, from its metadata."""
    from packaging.requirements import Requirement

    def holds(wanted: Requirement, extra: str) -> bool:
        return wanted.marker is None or wanted.marker.evaluate({"extra": extra})

    everything = map(Requirement, requires("ncd-serve") or ())
    return [wanted for wanted in everything if holds(wanted, extra) and (not extra or not holds(wanted, ""))]


def _torch() -> str:
    """Return version and devices of torch, from a separate process: this one does not import it."""
    try:
        version("torch")
    except PackageNotFoundError:
        raise MissingExtraError.of("train", "torch") from None
    said = _ask_child([sys.executable, "-c", ASK_TORCH], mend="pip install --force-reinstall torch")
    installed, built_for, gpus = json.loads(said.splitlines()[-1])
    if gpus:
        return f"{installed}, CUDA {built_for}: {', '.join(gpus)}"
    if not _has_gpu():
        return f"{installed}, on the CPU: no NVIDIA GPU here"
    built = f"is built for CUDA {built_for}" if built_for else "is built without CUDA"
    raise BrokenInstallationError(
        f"{installed} {built} and does not use this machine's GPU",
        hint="nvidia-smi (shows the CUDA version of the driver), then install a torch that is built for it",
    )


def _ask_child(command: list[str], *, mend: str, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise BrokenInstallationError(f"no answer within {CHILD_SECONDS} s", hint=mend) from None
    except subprocess.CalledProcessError as error:
        last_words = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise BrokenInstallationError(last_words[-1], hint=mend) from None
    return done.stdout


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _onnxruntime() -> str:
    import onnxruntime as ort

    _open_tiny_model(Device.CPU)
    return f"{ort.__version__}, computes on the CPU; lists {', '.join(ort.get_available_providers())}"


def _provider(device: Device, libraries: str) -> str:
    """Check an ONNX Runtime provider with a session: a listed one may lack its libraries or its GPU."""
    try:
        _open_tiny_model(device)
    except MissingExtraError as error:
        if _has_gpu():
            raise BrokenInstallationError(str(error), hint=f"pip install {libraries}") from None
        raise MissingExtraError(f"{error}: there is no NVIDIA GPU", hint="none needed: --device cpu") from None
    return "computes"


def _open_tiny_model(device: Device) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.onnx"
        model.write_bytes(TINY_MODEL)
        open_session(model, threads=1, device=device)


def _triton() -> str:
    """Return Triton's binary and version, which it prints only at a start: here on a repository that does not exist."""
    install = find_triton()
    install.check_backend()
    with tempfile.TemporaryDirectory() as folder:
        backends = install.lay_out(Path(folder) / "backends")
        command = [str(install.executable), *backends, f"--model-repository={folder}/nowhere"]
        try:
            done = subprocess.run(
                command, env=install.environment(), capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"Triton does not start: {error}", hint=f"try it: {install.executable} --help") from None
    said = done.stdout + done.stderr
    told = re.search(r"server_version\s*\|\s*(\S+)", said)
    if told is None:
        last_words = said.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ServerError(f"Triton does not start: {last_words[-1]}", hint=f"try it: {install.executable} --help")
    return f"{told[1]} from {'the wheel' if install.source == 'wheel' else install.source}: {install.executable}"


def _stub() -> str:
    """Return the Python that runs models inside the wheel's server, with its numpy; `find_triton` rejects numpy 2."""
    install = find_triton()
    if install.source == "PATH":
        return "the server's own"
    command = ["python3", "-c", ASK_STUB]
    mend = "pip install 'ncd-serve[triton]'"
    python, numpy = _ask_child(command, mend=mend, environment=install.environment()).split()
    return f"Python {python}, numpy {numpy}, libpython in {install.libraries[0]}"


def _cores_and_memory() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total, free = _memory()
    found = f"{cores} cores, {_size(free)} of {_size(total)} free"
    if free < MIN_MEMORY_BYTES:
        raise BrokenInstallationError(found, hint="end other programs, or train with smaller batches")
    return found


def _memory() -> tuple[float, float]:
    """Return total and free memory in bytes, within the limit of a container if there is one."""
    pages = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}
    total = free = float(pages["SC_PAGE_SIZE"] * pages["SC_PHYS_PAGES"])
    if told := re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo")):
        free = 1024.0 * int(told[1])
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total, free = min(total, int(limit)), min(free, int(limit) - int(used))
    return total, free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _room(folder: Path, mend: str) -> str:
    free = shutil.disk_usage(folder).free
    found = f"{_size(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        raise DataError(f"{folder} cannot be written to", hint=mend)
    if free < MIN_DISK_BYTES:
        raise DataError(found, hint=mend)
    return found


def _shared_memory() -> str:
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{_size(free)} free in {SHARED_MEMORY}, which Triton passes images through"
    if free < MIN_SHARED_BYTES:
        raise ServerError(found, hint=f"mount -o remount,size=1G {SHARED_MEMORY}, or in Docker: --shm-size=1g")
    return found


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
