"""Strict schemas of KServe's resources.

KServe publishes none, but its Python package has a class for each, generated from its OpenAPI description: with the
names and types of all fields. They are read, not imported, since that package needs other versions of ours. Parts that
are Kubernetes' own are looked up in the strict schemas of `kubernetes-validate`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft7Validator

PACKAGE = "kserve==0.21.0"
KEPT = Path(__file__).parents[2] / "build" / "kserve"
PLAIN = {"str": "string", "int": "integer", "bool": "boolean", "object": "object", "datetime": "string"}
STRICT = f"v{kubernetes_validate.latest_version()}-local-strict"


def validate_kserve(entry: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError unless this is a resource that KServe knows, field by field."""
    kind = entry["apiVersion"].rpartition("/")[2].capitalize() + entry["kind"]
    # Not jsonschema.validate: that checks the schemas of all Kubernetes first, for ten seconds.
    Draft7Validator({"$ref": f"#/$defs/{kind}", "$defs": _definitions()}).validate(entry)


@cache
def _definitions() -> dict[str, Any]:
    definitions = _kubernetes_definitions()
    for name, fields in _kserve_classes().items():
        known = {field: _type(text, definitions) for field, text in fields.items()}
        definitions[name] = {"type": "object", "properties": known, "additionalProperties": False}
    return definitions


def _kserve_classes() -> dict[str, dict[str, str]]:
    """The fields of each class, with their types in words."""
    if not list(KEPT.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(KEPT), PACKAGE]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode and "CI" not in os.environ:
            pytest.skip(f"{PACKAGE} cannot be downloaded here")
        assert done.returncode == 0, done.stderr
    (wheel,) = KEPT.glob("*.whl")
    classes = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"kserve/models/\w+\.py", name):
                classes.update(dict(_fields(archive.read(name).decode())))
    return classes


def _fields(source: str) -> Any:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found = {
                line.targets[0].id: ast.literal_eval(line.value)
                for line in node.body
                if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
            }
            yield node.name, {found["attribute_map"][key]: text for key, text in found["openapi_types"].items()}


def _type(text: str, definitions: dict[str, Any]) -> dict[str, Any]:
    if inner := re.fullmatch(r"list\[(.+)\]", text):
        return {"type": "array", "items": _type(inner[1], definitions)}
    if inner := re.fullmatch(r"dict\(str, (.+)\)", text):
        return {"type": "object", "additionalProperties": _type(inner[1], definitions)}
    if text in PLAIN:
        return {"type": PLAIN[text]}
    ours = re.sub("^V1(?=[A-Z])", "", text)
    places = ("io.k8s.api.core.v1", "io.k8s.apimachinery.pkg.apis.meta.v1")
    found = next((f"{place}.{ours}" for place in places if f"{place}.{ours}" in definitions), text)
    return {"$ref": f"#/$defs/{found}"}


def _kubernetes_definitions() -> dict[str, Any]:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / STRICT
    return dict(json.loads((folder / "_definitions.json").read_text())["$defs"])
