"""Horovod's interface on a new engine, with BAGUA's relaxed communication behind one keyword.

Import a front end, as with Horovod: `import bagua_hvd.torch as hvd`. Importing this package imports no framework.
"""
from bagua_hvd.core.version import __version__ as __version__


def __getattr__(name):
    # Imported late: most importers of the package want a front end, not the launcher.
    if name == "run":
        from bagua_hvd.runner import run

        return run
    frontend = ": import a front end, such as `import bagua_hvd.torch as hvd`, or bagua_hvd.tensorflow, bagua_hvd.keras"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + frontend * (not name.startswith("_")))


def register_with_torch() -> None:
    """Registers the torch.distributed backend "bagua"; `import torch` calls this by entry point `torch.backends`."""
    import torch.distributed

    if not torch.distributed.is_available() or "BAGUA" in torch.distributed.Backend._plugins:
        return

    def create(backend_options, options):
        from bagua_hvd.torch.distributed import group  # late: most importers of torch do not need it

        return group.create(backend_options, options)

    torch.distributed.Backend.register_backend("bagua", create, extended_api=True, devices=["cpu", "cuda"])
