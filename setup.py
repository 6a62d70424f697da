"""What pyproject.toml cannot say: the cffi module, the C libraries under it, the ops for TensorFlow, kernels for GPUs.

See build.py.
"""
import runpy
from pathlib import Path

from setuptools import Extension, setup

build = runpy.run_path(str(Path(__file__).parent / "build.py"))
build["write_device_source"]()

setup(cffi_modules=["build.py:ffibuilder"], libraries=build["LIBRARIES"],
      ext_modules=[Extension(**build["TENSORFLOW_OPS"])])
