"""Options of tritonserver that a user passes through: TLS, restricted interfaces, metrics, cache, log and more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What `ncd-serve serve` decides itself, and the option of ours that changes it.
OURS = {
    "model-repository": "--repository",
    "model-store": "--repository",
    "http-address": "--host",
    "grpc-address": "--host",
    "metrics-address": "--host",
    "http-port": "--http-port",
    "grpc-port": "--grpc-port",
    "metrics-port": "--metrics-port",
}
READ_FILES = ("grpc-server-cert", "grpc-server-key", "grpc-root-cert")
WRITTEN_FILES = ("log-file",)
TLS = ("grpc-use-ssl", "grpc-use-ssl-mutual")


class TritonOptions:
    """Checked `--name=value` options, with paths that hold in any working directory."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._pairs = [_checked(name, value) for name, value in _pairs(words)]

    def as_arguments(self) -> list[str]:
        """Return the arguments of tritonserver."""
        return [f"--{name}={value}" if value else f"--{name}" for name, value in self._pairs]

    @property
    def has_tls(self) -> bool:
        """True if gRPC is encrypted. Triton has no TLS for HTTP."""
        return any(name in TLS and _is_true(value) for name, value in self._pairs)

    @property
    def backend_directory(self) -> str:
        """Folder of the backends, if the user has named one."""
        return dict(self._pairs).get("backend-directory", "")

    @property
    def restricted_protocols(self) -> set[str]:
        """Interfaces of gRPC that the user has restricted."""
        return {api for apis, _, _ in self._restrictions("grpc-restricted-protocol") for api in apis.split(",")}

    def headers(self) -> dict[str, str]:
        """Return the headers that pass all HTTP restrictions."""
        return {key: value for _, key, value in self._restrictions("http-restricted-api")}

    def _restrictions(self, option: str) -> Iterable[tuple[str, str, str]]:
        """Yield interfaces, key and value of each `--OPTION=API,API:KEY=VALUE`."""
        for name, text in self._pairs:
            if name == option:
                apis, _, pair = text.partition(":")
                key, _, value = pair.partition("=")
                yield apis, key, value


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield name and value of `--a=b`, `--a b` and `--a`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"'{word}' is not an option of tritonserver", hint="give --NAME=VALUE after a lone --")
        name, has_value, value = word[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield name, value


def _checked(name: str, value: str) -> tuple[str, str]:
    if name in OURS:
        raise UsageError(f"--{name} is set by ncd-serve itself", hint=f"use {OURS[name]} before the lone --")
    if name == "allow-http" and not _is_true(value):
        raise UsageError("ncd-serve needs HTTP to supervise Triton", hint="the default --host keeps it on this machine")
    if name in READ_FILES and not Path(value).is_file():
        raise DataError(f"--{name}: no such file: {value}", hint="check the path")
    if name in (*READ_FILES, *WRITTEN_FILES):
        value = str(Path(value).absolute())
    return name, value


def _is_true(value: str) -> bool:
    return value.lower() in ("", "true", "1", "on")
