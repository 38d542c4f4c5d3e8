"""Writer of the files of a deployment, into a separate folder; files that a user changed are never overwritten."""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ncd_serve import triton
from ncd_serve.deploy import Target
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import atomic_directory, sha256

if TYPE_CHECKING:
    from ncd_serve.deploy.facts import Deployment

MARK = "ncd-serve.json"  # names the files that were written, with their hashes
SOURCES = Path(str(files("ncd_serve.deploy"))) / "files"
TEMPLATE = ".jinja"
# What the Python of NVIDIA's image (3.12) gets beside Triton.
PINS = {"numpy": "1.26.4", "pillow": "12.0.0", "pydantic": "2.14.3"}
# From a folder of `files/` to one of the output.
_LAYOUT = {
    Target.COMPOSE: {"image": "image", "compose": ".", "monitoring": "monitoring"},
    Target.HELM: {"image": "image", "helm": ".", "monitoring": "chart/files"},
    Target.KSERVE: {"image": "image", "kserve": "."},
}


def render(deployment: Deployment, target: Target, out: Path) -> None:
    """Fill the folder `out`. A folder that was rendered before is replaced unless it was changed since."""
    if target == Target.COMPOSE and deployment.storage == "pvc":
        raise UsageError("Compose has no volume claims", hint="omit --repository-uri: the repository is mounted")
    if target == Target.KSERVE and deployment.repository_uri.count("://") > 1:
        raise UsageError(
            "KServe takes the address of the storage from its Secret", hint="use --repository-uri s3://BUCKET/PATH"
        )
    check_untouched(out)
    try:
        with atomic_directory(out) as fresh:
            _fill(fresh, target, _facts(deployment, out))
            written = {
                str(path.relative_to(fresh)): sha256(path) for path in sorted(fresh.rglob("*")) if path.is_file()
            }
            (fresh / MARK).write_text(json.dumps({"target": target.value, "files": written}, indent=2) + "\n")
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or out}: {error.strerror}", hint="choose another --out"
        ) from None


def check_untouched(out: Path) -> None:
    """Raise DataError if writing to `out` would destroy files of the user."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    mark = out / MARK
    try:
        known = json.loads(mark.read_bytes())["files"]
    except (OSError, ValueError, TypeError, KeyError):
        raise DataError(f"{out} was not made by ncd-serve deploy render", hint="choose another --out") from None
    found = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and path != mark}
    for name, path in found.items():
        if known.get(name) != sha256(path):
            raise DataError(
                f"{path} was changed after it was rendered",
                hint="choose another --out; changes are best kept elsewhere, e.g. in a values file of your own",
            )


def _facts(deployment: Deployment, out: Path) -> dict[str, Any]:
    names = [name for name in dir(deployment) if not name.startswith("_")]
    # Compose would take a dollar sign for a variable.
    mounted = os.path.relpath(deployment.repository.resolve(), out.resolve()).replace("$", "$$")
    return {**{name: getattr(deployment, name) for name in names}, "repository": mounted, "pins": PINS}


def _fill(folder: Path, target: Target, facts: dict[str, Any]) -> None:
    # Not Jinja's own braces: Helm, Prometheus and Grafana use those.
    environment = jinja2.Environment(
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # every fact was checked against what may stand in YAML
    )
    for source, place in _LAYOUT[target].items():
        for path in (SOURCES / source).rglob("*"):
            if path.is_file():
                goal = folder / place / path.relative_to(SOURCES / source)
                goal.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == TEMPLATE:
                    goal.with_suffix("").write_text(environment.from_string(path.read_text()).render(facts))
                else:
                    shutil.copyfile(path, goal)
    for program in ("probe.py", "gate.py"):
        shutil.copy(Path(triton.__file__).with_name(program), folder / "image")
