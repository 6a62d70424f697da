"""The algorithms, one file each, and the names for `DistributedOptimizer(..., algorithm="name")`.

docs/algorithms.md says what each does, costs and is good for. Your own: subclass Algorithm, and register() it or pass
an instance.
"""
from bagua_hvd.algorithms.acco import Acco
from bagua_hvd.algorithms.async_decentralized import AsyncDecentralized
from bagua_hvd.algorithms.async_low_precision import AsyncLowPrecision
from bagua_hvd.algorithms.async_low_precision_decentralized import AsyncLowPrecisionDecentralized
from bagua_hvd.algorithms.async_mean import Async
from bagua_hvd.algorithms.auto import Auto
from bagua_hvd.algorithms.base import Algorithm, Safety, choose, get, names, register
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.algorithms.choco import Choco
from bagua_hvd.algorithms.decentralized import Decentralized
from bagua_hvd.algorithms.diloco import DiLoCo
from bagua_hvd.algorithms.dion import Dion
from bagua_hvd.algorithms.doublesqueeze import DoubleSqueeze
from bagua_hvd.algorithms.ef_signsgd import EFSignSGD
from bagua_hvd.algorithms.gradient_allreduce import GradientAllReduce
from bagua_hvd.algorithms.lamb import Lamb
from bagua_hvd.algorithms.local_adam import LocalAdam
from bagua_hvd.algorithms.local_sgd import LocalSGD
from bagua_hvd.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua_hvd.algorithms.onebit_adam import OneBitAdam
from bagua_hvd.algorithms.onebit_adam_published import OneBitAdamPublished
from bagua_hvd.algorithms.onebit_lamb import OneBitLamb
from bagua_hvd.algorithms.powersgd import PowerSGD
from bagua_hvd.algorithms.push_sum import PushSum
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.algorithms.qsgd import QSGD
from bagua_hvd.algorithms.rotated import Rotated
from bagua_hvd.algorithms.streaming_diloco import StreamingDiLoCo
from bagua_hvd.algorithms.terngrad import TernGrad
from bagua_hvd.algorithms.topk import TopK
from bagua_hvd.algorithms.zero_one_adam import ZeroOneAdam

register("auto", Auto)
register("gradient_allreduce", GradientAllReduce)
register("bytegrad", ByteGrad)
register("rotated", Rotated)
register("decentralized", Decentralized)
register("low_precision_decentralized", LowPrecisionDecentralized)
register("qadam", QAdam)
register("async", Async)
register("async_low_precision", AsyncLowPrecision)
register("async_decentralized", AsyncDecentralized)
register("async_low_precision_decentralized", AsyncLowPrecisionDecentralized)
register("doublesqueeze", DoubleSqueeze)
register("ef_signsgd", EFSignSGD)
register("onebit_adam", OneBitAdam)
register("onebit_adam_published", OneBitAdamPublished)
register("dion", Dion)
register("push_sum", PushSum)
register("acco", Acco)
register("lamb", Lamb)
register("onebit_lamb", OneBitLamb)
register("zero_one_adam", ZeroOneAdam)
register("powersgd", PowerSGD)
register("topk", TopK)
register("qsgd", QSGD)
register("terngrad", TernGrad)
register("local_sgd", LocalSGD)
register("local_adam", LocalAdam)
register("choco", Choco)
register("diloco", DiLoCo)
register("streaming_diloco", StreamingDiLoCo)

__all__ = [
    "Acco", "Algorithm", "Async", "AsyncDecentralized", "AsyncLowPrecision", "AsyncLowPrecisionDecentralized", "Auto",
    "ByteGrad", "Choco", "Decentralized", "DiLoCo", "Dion", "DoubleSqueeze", "EFSignSGD", "GradientAllReduce", "Lamb",
    "LocalAdam", "LocalSGD", "LowPrecisionDecentralized", "OneBitAdam", "OneBitAdamPublished", "OneBitLamb", "PowerSGD",
    "PushSum", "QAdam", "QSGD", "Rotated", "Safety", "StreamingDiLoCo", "TernGrad", "TopK", "ZeroOneAdam", "choose",
    "get", "names", "register",
]
