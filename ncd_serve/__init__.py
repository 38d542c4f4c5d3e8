"""Discover unnamed image categories, and serve cluster ids for new images on NVIDIA Triton."""

# Nothing is imported here, not even `typing`: Ctrl-C shows a traceback until `__main__` runs, after this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ncd_serve.bundle import Bundle
    from ncd_serve.client.client import AsyncClient, Client
    from ncd_serve.errors import NcdError
    from ncd_serve.inputs.images import Source
    from ncd_serve.inputs.sources import find_sources
    from ncd_serve.prediction import Prediction
    from ncd_serve.rows.assignment import assign_images
    from ncd_serve.runners import OnnxRunner
    from ncd_serve.triton.serve import serve

__version__ = "0.2.0"
__all__ = [
    "AsyncClient",
    "Bundle",
    "Client",
    "NcdError",
    "OnnxRunner",
    "Prediction",
    "Source",
    "__version__",
    "assign_images",
    "find_sources",
    "serve",
]

# Imported when first asked for: the command line must not wait for gRPC to show its help.
_HOMES = {
    "AsyncClient": "client.client",
    "Bundle": "bundle",
    "Client": "client.client",
    "NcdError": "errors",
    "OnnxRunner": "runners",
    "Prediction": "prediction",
    "Source": "inputs.images",
    "assign_images": "rows.assignment",
    "find_sources": "inputs.sources",
    "serve": "triton.serve",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'ncd_serve' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"ncd_serve.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
