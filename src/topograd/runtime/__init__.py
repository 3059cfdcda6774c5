"""What runs a model that writes: torch, or a session of ONNX Runtime for each stage."""
