"""The algorithms, one file each, and the names for `DistributedOptimizer(..., algorithm="name")`.

    menu            auto, gradient_allreduce, bytegrad, rotated, powersgd, onebit_adam, diloco, async
    specialists     decentralized, low_precision_decentralized, choco, local_sgd, qadam, topk, doublesqueeze

docs/choose.md selects from the menu by three questions; docs/algorithms.md states what each algorithm does and costs.
To add your own, subclass Algorithm, then register() the class or pass an instance.
"""
from bagua_hvd.algorithms.async_average import Async
from bagua_hvd.algorithms.auto import Auto
from bagua_hvd.algorithms.base import Algorithm, Safety, choose, get, names, register
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.algorithms.choco import Choco
from bagua_hvd.algorithms.decentralized import Decentralized
from bagua_hvd.algorithms.diloco import DiLoCo
from bagua_hvd.algorithms.doublesqueeze import DoubleSqueeze
from bagua_hvd.algorithms.gradient_allreduce import GradientAllReduce
from bagua_hvd.algorithms.local_sgd import LocalSGD
from bagua_hvd.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua_hvd.algorithms.onebit_adam import OneBitAdam
from bagua_hvd.algorithms.powersgd import PowerSGD
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.algorithms.rotated import Rotated
from bagua_hvd.algorithms.topk import TopK

_MENU: dict[str, type[Algorithm]] = {
    "auto": Auto, "gradient_allreduce": GradientAllReduce, "bytegrad": ByteGrad, "rotated": Rotated,
    "powersgd": PowerSGD, "onebit_adam": OneBitAdam, "diloco": DiLoCo, "async": Async,
}
_SPECIALISTS: dict[str, type[Algorithm]] = {
    "decentralized": Decentralized, "low_precision_decentralized": LowPrecisionDecentralized, "choco": Choco,
    "local_sgd": LocalSGD, "qadam": QAdam, "topk": TopK, "doublesqueeze": DoubleSqueeze,
}
for _name, _class in {**_MENU, **_SPECIALISTS}.items():
    register(_name, _class)


def menu() -> list[str]:
    """The names to choose from first, mildest first."""
    return list(_MENU)


__all__ = [
    "Algorithm", "Async", "Auto", "ByteGrad", "Choco", "Decentralized", "DiLoCo", "DoubleSqueeze", "GradientAllReduce",
    "LocalSGD", "LowPrecisionDecentralized", "OneBitAdam", "PowerSGD", "QAdam", "Rotated", "Safety", "TopK", "choose",
    "get", "menu", "names", "register",
]
