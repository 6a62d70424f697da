"""The parts of the build that pyproject.toml cannot state: the cffi module, C libraries, TensorFlow's ops, GPU kernels.

See build.py.
"""
import os
import runpy
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib

build = runpy.run_path(str(Path(__file__).parent / "build.py"))
build["require_linux"]()
build["write_device_source"]()
build["write_stub"]()
# One wheel serves every Python from this one on; free-threaded Pythons have no limited API.
wheel = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}


class BuildInParallel(build_clib):
    """Compiles one file per processor in parallel; setuptools compiles sequentially."""

    def build_libraries(self, libraries):
        compile_one, archive, jobs = self.compiler._compile, self.compiler.create_static_lib, []

        def archive_what_is_compiled(objects, name, output_dir=None, **kwargs):
            while jobs:
                jobs.pop().result()
            # ar would keep the objects of files that are gone.
            Path(self.compiler.library_filename(name, output_dir=output_dir or "")).unlink(missing_ok=True)
            archive(objects, name, output_dir=output_dir, **kwargs)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiler._compile = lambda *args: jobs.append(pool.submit(compile_one, *args))
            self.compiler.create_static_lib = archive_what_is_compiled
            objects = self.build_temp
            for library in libraries:               # some files are in several libraries, with other flags
                self.build_temp = os.path.join(objects, library[0])
                super().build_libraries([library])


setup(cmdclass={"build_clib": BuildInParallel}, cffi_modules=["build.py:ffibuilder"], libraries=build["LIBRARIES"],
      ext_modules=[Extension(**build["TENSORFLOW_OPS"])],
      options={"bdist_wheel": wheel})
