"""Kernels of our own for x86-64 with AVX2: a stage is one call of a C++ function (`csrc/`)."""
