"""Lightning on bagua_hvd: strategies for the Trainer and for Fabric, and an environment for baguarun.

    import bagua_hvd.lightning                              # registers "bagua", "bagua_bytegrad", ...
    trainer = lightning.Trainer(strategy="bagua_bytegrad", accelerator="cpu", devices=2)

Supports `lightning`, and `pytorch_lightning` with `lightning_fabric` if only those are installed, or were imported
first. See docs/lightning.md.
"""
from bagua_hvd import algorithms
from bagua_hvd.lightning.environment import BaguarunEnvironment, of_fabric, of_pytorch
from bagua_hvd.lightning.strategy import BaguaFabricStrategy, BaguaStrategy

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "BaguarunEnvironment"]

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def _register() -> None:
    """Registers "bagua", and "bagua_<algorithm>" for each on the menu; each with every start method, too."""
    for registry, cls in ((of_pytorch("strategies").StrategyRegistry, BaguaStrategy),
                          (of_fabric("strategies").STRATEGY_REGISTRY, BaguaFabricStrategy)):
        for algorithm in (None, *algorithms.menu()):
            for ending, start_method in _START_METHODS.items():
                name = f"bagua_{algorithm}{ending}" if algorithm else f"bagua{ending}"
                if name not in registry:
                    registry.register(name, cls, description=f"bagua_hvd, {algorithm or 'gradient_allreduce'}",
                                      algorithm=algorithm, start_method=start_method)


_register()
