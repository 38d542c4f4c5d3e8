"""Turn a run into a verified ONNX bundle and a Triton model repository."""
