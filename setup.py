"""What pyproject.toml cannot say: the cffi module, the C libraries under it, the libraries apart, kernels for GPUs.

See build.py.
"""
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

build = runpy.run_path(str(Path(__file__).parent / "build.py"))
build["require_linux"]()
build["write_device_source"]()
# One wheel serves every Python from this one on; those without the GIL have no limited API.
wheel = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}

setup(cffi_modules=["build.py:ffibuilder"], libraries=build["LIBRARIES"],
      ext_modules=[Extension(**build[library]) for library in ("TENSORFLOW_OPS", "BENCH_NETWORK")],
      options={"bdist_wheel": wheel})
