"""`import bagua_hvd.as_horovod` makes `import horovod` and every `import horovod.X` give bagua_hvd and bagua_hvd.X.

For scripts that should stay unedited; `baguarun --as-horovod` does this in every rank. Both names give the same module
objects, so exceptions, constants and process sets are the same. An installed Horovod is hidden while the process lives.
Idempotent.

Raises:
    ImportError: a real horovod has been imported already.
"""
import importlib
import importlib.util
import sys
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec

import bagua_hvd

VERSION = "0.28.1"      # the release with this interface
_NAME = "horovod"
_PREFIX = _NAME + "."


def _real_name(name):
    return bagua_hvd.__name__ + name[len(_NAME):]


class _AsHorovod(MetaPathFinder):
    """Finds every horovod module."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _NAME and not fullname.startswith(_PREFIX):
            return None
        real_name = _real_name(fullname)
        found = importlib.util.find_spec(real_name)
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: bagua_hvd stands in for horovod and has no {real_name!r}", name=fullname
            )
        spec = ModuleSpec(fullname, _Loader(found), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class _Loader(ExecutionLoader):
    """Loads a horovod module; `python -m` runs the code of the bagua_hvd module.

    Args:
        real: the spec of the bagua_hvd module.
    """

    def __init__(self, real):
        self._real = real

    def is_package(self, fullname):
        return self._real.submodule_search_locations is not None

    def get_source(self, fullname):
        return self._real.loader.get_source(self._real.name)

    def get_filename(self, fullname):
        return self._real.origin

    def exec_module(self, module):
        # The import system takes the entry in sys.modules, instead of the empty module that it made.
        sys.modules[module.__name__] = importlib.import_module(_real_name(module.__name__))


def _install():
    present = sys.modules.get(_NAME)
    if present is bagua_hvd:
        return
    if present is not None:
        raise ImportError(
            f"bagua_hvd cannot stand in for horovod: the real one, {getattr(present, '__file__', present)}, has been "
            "imported already; import bagua_hvd.as_horovod before anything that imports horovod."
        )
    sys.meta_path.insert(0, _AsHorovod())
    sys.modules[_NAME] = bagua_hvd
    bagua_hvd.__version__ = VERSION     # scripts compare horovod.__version__; our own code reads core.version


_install()
