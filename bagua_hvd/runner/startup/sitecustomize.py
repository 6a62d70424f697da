"""Run at the start of every Python of a `baguarun --as-horovod` job: makes `import horovod` give bagua_hvd.

This folder is then first in PYTHONPATH. It hides a sitecustomize of the installation, which is run afterwards. Pythons
that ignore PYTHONPATH (-I, -E) or have no site (-S) do not run this file.
"""
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install_alias():
    try:
        import bagua_hvd.as_horovod  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(f"baguarun --as-horovod: no effect in {sys.executable}: {error}\n")


def _run_hidden_sitecustomize():
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


_install_alias()
_run_hidden_sitecustomize()
