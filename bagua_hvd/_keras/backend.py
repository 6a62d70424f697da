"""How gradients are reduced on the backend that Keras runs on.

A reduction is an object with

    reduction(gradients, variables)     reduced gradients, in their order; None where there was None
    update(apply, instead)              calls apply(), or instead() where the algorithm has updated the weights
    stepped()                           the weights are new
    dense(gradient)                     a gradient that can be added up
    identify(variable)                  the key by which a variable is known
    register_local(variable)            from now on this one is not reduced
    reset()                             forget what is pending
    number, renumber(numbers)           see numbering.py
"""
from contextlib import nullcontext

import keras


def make_reduction(options, optimizer, passes):
    """The reduction of GradientOptions on this backend.

    Args:
        optimizer: whose gradients they are; held weakly. passes: its backward passes for each step.
    Raises:
        ValueError: the algorithm cannot serve the optimizer.
        NotImplementedError: the backend is neither tensorflow nor torch.
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from bagua_hvd.tensorflow.reduction import Reduction

        return Reduction(options, weights=True, optimizer=optimizer, passes=passes)
    if name == "torch":
        from bagua_hvd._keras.torch_reduction import Reduction

        return Reduction(options, optimizer, passes)
    raise NotImplementedError(
        f"KERAS_BACKEND={name}: distributed optimizers work on the backends tensorflow and torch"
    )


def as_written(function):
    """Decorator: TensorFlow's AutoGraph, which would rewrite it and all that it calls, leaves it alone."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf  # not our front end: that imports the module which is being decorated

    return tf.autograph.experimental.do_not_convert(function)


def shared_reductions():
    """What beside optimizers has numbers; see numbering.py."""
    if keras.backend.backend() != "tensorflow":
        return []
    from bagua_hvd.tensorflow.reduction import shared_reductions

    return [shared_reductions]


def default_compression():
    """Compression of the backend: classes none and fp16."""
    if keras.backend.backend() == "torch":
        from bagua_hvd.torch.compression import Compression
    else:
        from bagua_hvd.tensorflow.compression import Compression
    return Compression


def translated_errors():
    """A context in which a failed collective raises HorovodInternalError, whatever the backend makes of it."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    from bagua_hvd.tensorflow.elastic import translated_errors

    return translated_errors()
