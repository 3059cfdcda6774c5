"""Inference backends: PyTorch, or a session of ONNX Runtime for each stage."""
