"""Registers strategies: "bagua", and "bagua_<algorithm>" for each on the menu; each with every start method, too."""
from bagua_hvd import algorithms
from bagua_hvd.lightning.fabric import BaguaFabricStrategy
from bagua_hvd.lightning.packages import of_fabric, of_pytorch
from bagua_hvd.lightning.strategy import BaguaStrategy

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register() -> None:
    """Registers the names that are not registered yet."""
    for registry, cls in ((of_pytorch("strategies").StrategyRegistry, BaguaStrategy),
                          (of_fabric("strategies").STRATEGY_REGISTRY, BaguaFabricStrategy)):
        for algorithm in (None, *algorithms.menu()):
            for ending, start_method in _START_METHODS.items():
                name = f"bagua_{algorithm}{ending}" if algorithm else f"bagua{ending}"
                if name not in registry:
                    registry.register(name, cls, description=f"bagua_hvd, {algorithm or 'gradient_allreduce'}",
                                      algorithm=algorithm, start_method=start_method)
