"""Horovod's interface on a new engine, with BAGUA's relaxed communication behind one keyword.

Import a front end, as with Horovod: `import bagua_hvd.torch as hvd`. Importing this package imports no framework.
"""
from bagua_hvd.core.version import __version__ as __version__


def __getattr__(name):
    # Late: most who import the package want a front end, not the launcher.
    if name == "run":
        from bagua_hvd.runner import run

        return run
    frontend = ": import a front end, such as `import bagua_hvd.torch as hvd`, or bagua_hvd.tensorflow, bagua_hvd.keras"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + frontend * (not name.startswith("_")))
