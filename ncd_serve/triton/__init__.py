"""Start a real NVIDIA Triton server on a model repository of ONNX models."""

from ncd_serve.triton.install import TritonInstall, find_triton
from ncd_serve.triton.repository import check_repository
from ncd_serve.triton.server import TritonServer

__all__ = ["TritonInstall", "TritonServer", "check_repository", "find_triton"]
