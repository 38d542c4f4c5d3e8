"""The folder that becomes Triton's `onnxruntime` backend."""
