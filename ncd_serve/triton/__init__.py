"""Start a real NVIDIA Triton server on a model repository of ONNX models, and keep it answering."""

from ncd_serve.triton.install import TritonInstall, find_triton
from ncd_serve.triton.jpeg import add_jpeg_model, jpeg_model_name
from ncd_serve.triton.repository import check_repository
from ncd_serve.triton.server import TritonServer
from ncd_serve.triton.supervise import Supervisor, Updates

__all__ = [
    "Supervisor",
    "TritonInstall",
    "TritonServer",
    "Updates",
    "add_jpeg_model",
    "check_repository",
    "find_triton",
    "jpeg_model_name",
]
