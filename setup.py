"""The native kernels: built where there is a C++ compiler, left out where there is none (`optional`)."""

from setuptools import Extension, setup

FOLDER = "src/topograd/runtime/native/csrc"

setup(
    ext_modules=[
        Extension(
            "topograd.runtime.native._kernels",
            [f"{FOLDER}/kernels.cpp"],
            depends=[
                f"{FOLDER}/{name}.h"
                for name in ("layout", "panels", "threads", "vectors", "tiles", "rows", "mamba", "stage")
            ],
            extra_compile_args=[
                *("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-g0"),
                *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # of GCC 12's own header
            ],
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=True,  # called by ctypes: any Python loads it
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
