"""What pyproject.toml cannot say: the cffi module and the C libraries under it. See build.py."""
import runpy
from pathlib import Path

from setuptools import setup

build = runpy.run_path(str(Path(__file__).parent / "build.py"))

setup(cffi_modules=["build.py:ffibuilder"], libraries=build["LIBRARIES"])
