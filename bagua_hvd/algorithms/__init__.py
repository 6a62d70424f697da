"""The algorithms, one file each, and the names for `DistributedOptimizer(..., algorithm="name")`.

Names: gradient_allreduce, bytegrad. Your own: subclass Algorithm, and register() it or pass an instance.
"""
from bagua_hvd.algorithms.base import Algorithm, Gradient, choose, get, names, register
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.algorithms.gradient_allreduce import GradientAllReduce

register("gradient_allreduce", GradientAllReduce)
register("bytegrad", ByteGrad)

__all__ = ["Algorithm", "ByteGrad", "Gradient", "GradientAllReduce", "choose", "get", "names", "register"]
