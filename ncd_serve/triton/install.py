"""Find Triton on this machine, and the files and variables that it needs to run."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ncd_serve.errors import MissingExtraError, ServerError

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
OUR_BACKEND = Path(__file__).parent / "backend" / "model.py"
USE_CONTAINER = "or use NVIDIA's Triton container, where tritonserver is on PATH"


@dataclass(frozen=True)
class TritonInstall:
    """A server binary. One on PATH is complete; the wheel's lacks backends, so we lay out a folder of them."""

    executable: Path
    source: Literal["PATH", "wheel"]
    python_backend: tuple[Path, ...] = ()
    caches: Path | None = None
    libraries: tuple[Path, ...] = ()

    def lay_out(self, directory: Path) -> list[str]:
        """Fill `directory` with the files that the server lacks, and return the arguments that point there."""
        if self.source == "PATH":
            return []
        for name, files in {"python": self.python_backend, "onnxruntime": (OUR_BACKEND,)}.items():
            (directory / name).mkdir(parents=True)
            for file in files:
                # Copies, for two reasons: Triton refuses libraries behind symlinks ("escapes backend directory"),
                # and it changes the mode of a stub that fails to run, which must not be the installed one.
                shutil.copy(file, directory / name)
        return [f"--backend-directory={directory}", f"--cache-directory={self.caches}", "--allow-gpu-metrics=false"]

    def check_backend(self, folder: str = "") -> None:
        """Raise ServerError if a server on PATH has no backend for ONNX models, in `folder` or where Triton looks."""
        if self.source == "wheel":
            return
        usual = (self.executable.resolve().parents[1] / "backends", Path("/opt/tritonserver/backends"))
        places = (Path(folder),) if folder else usual
        if not any(any(place.glob("onnxruntime/*")) for place in places):
            raise ServerError(
                f"the Triton on PATH ({self.executable}) has no ONNX Runtime backend in {places[0]}",
                hint="use NVIDIA's full image (tritonserver:YY.MM-py3), name a folder with -- --backend-directory=DIR, "
                "or take it off PATH: ncd-serve[triton] brings one",
            )

    def environment(self) -> dict[str, str]:
        """Return the environment of the server process."""
        environment = dict(os.environ)
        if self.source == "wheel":
            # The stub embeds the first python3 on PATH: it has to be this one, with its onnxruntime and numpy.
            environment["PATH"] = _joined(Path(sys.executable).parent, environment.get("PATH"))
            environment["LD_LIBRARY_PATH"] = _joined(*self.libraries, environment.get("LD_LIBRARY_PATH"))
            # Our backend runs on the CPU. Without this a machine with a GPU would hand it GPU instances.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment


def find_triton() -> TritonInstall:
    """Return the `tritonserver` on PATH, else that of the nvidia-pytriton wheel; raise an error if neither can run."""
    if on_path := shutil.which("tritonserver"):
        return TritonInstall(Path(on_path), "PATH")
    package = find_spec("pytriton")  # not imported: only the files beside it are of use
    if package is None or package.origin is None:
        raise MissingExtraError(
            "this needs a Triton server, and none is installed",
            hint=f"pip install 'ncd-serve[triton]' (Linux x86-64, Python 3.10-3.12) {USE_CONTAINER}",
        )
    return _from_wheel(Path(package.origin).parent)


def _from_wheel(package: Path) -> TritonInstall:
    root = package / "tritonserver"
    backend = root / "backends" / "python"
    stub = root / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.is_file():
        raise MissingExtraError(
            f"the nvidia-pytriton wheel in {package} has no stub for Python {PYTHON}",
            hint=f"use Python 3.10-3.12 {USE_CONTAINER}",
        )
    if int(version("numpy").split(".")[0]) >= 2:
        # Not a warning: tensors arrive with the right shape and wrong values, and nothing fails.
        raise ServerError(
            f"Triton from the wheel silently corrupts arrays of numpy {version('numpy')}",
            hint=f"pip install 'numpy<2' {USE_CONTAINER}",
        )
    return TritonInstall(
        executable=root / "bin" / "tritonserver",
        source="wheel",
        python_backend=(backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub),
        caches=root / "caches",
        # The copied libraries no longer find their own beside them.
        libraries=(_libpython_directory(), package.parent / "nvidia_pytriton.libs"),
    )


def _libpython_directory() -> Path:
    """Return the folder of this interpreter's shared library: the stub embeds Python and links to it."""
    name = f"libpython{PYTHON}.so.1.0"
    built_for = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    # base_prefix: a relocated interpreter (uv, conda) still reports the LIBDIR of the machine that built it.
    for directory in (built_for, built_for / multiarch, Path(sys.base_prefix) / "lib"):
        if (directory / name).is_file():
            return directory
    raise MissingExtraError(
        f"Triton needs {name}, which this Python ({sys.base_prefix}) does not have",
        hint=f"apt install libpython{PYTHON}, or use a Python built with --enable-shared, {USE_CONTAINER}",
    )


def _joined(*parts: Path | str | None) -> str:
    return os.pathsep.join(str(part) for part in parts if part)
