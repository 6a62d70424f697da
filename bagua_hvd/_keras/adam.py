"""Adam and AdamW of Keras 3 and tf_keras, for algorithms that update the weights instead of them.

The moments are variables of the optimizer, so each backend supplies their memory. Hyperparameters are numbers, except
the learning rate, which may be a variable or a schedule.
"""
import sys
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import keras

from bagua_hvd.core.native import TensorView
from bagua_hvd.training.adam import Adam, AdamMember
from bagua_hvd.training.source import Source

# Options of apply() beyond Adam's formula, which an algorithm would ignore.
_UNSERVED = ("amsgrad", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "gradient_accumulation_steps",
             "loss_scale_factor", "loss_scaled")


def check(optimizer: Any) -> None:
    """Raises ValueError, with the reason, if the optimizer cannot be served."""
    if optimizer is None:
        raise ValueError("it needs the state of a Keras optimizer")
    classes = [keras.optimizers.Adam, keras.optimizers.AdamW]
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is not None:
        classes += [tf_keras.optimizers.Adam, tf_keras.optimizers.AdamW]
    if not isinstance(optimizer, tuple(classes)):
        raise ValueError(f"it needs keras.optimizers.Adam or AdamW, not {type(optimizer).__name__}")
    for cls in type(optimizer).__mro__:
        if cls in classes:
            break
        if "update_step" in vars(cls) and not cls.__module__.startswith("bagua_hvd."):
            raise ValueError(f"it makes Adam's step itself and would bypass {cls.__name__}.update_step()")
    for option in _UNSERVED:
        if getattr(optimizer, option, None):
            raise ValueError(f"it cannot serve {type(optimizer).__name__} with {option}={getattr(optimizer, option)!r}")


def is_served(optimizer: Any, tf_keras: bool = True) -> Any:
    """Whether check() accepts the optimizer, which may be None. tf_keras: whether those of tf_keras are accepted."""
    try:
        check(optimizer)
    except ValueError:
        return False
    return tf_keras or hasattr(optimizer, "_get_variable_index")


def moments(optimizer: Any, variable: Any) -> Any:
    """The optimizer's variables (m, v) of a weight."""
    if hasattr(optimizer, "_get_variable_index"):
        index = optimizer._get_variable_index(variable)
    else:                                               # tf_keras
        index = optimizer._index_dict[optimizer._var_key(variable)]
    return optimizer._momentums[index], optimizer._velocities[index]


def learning_rate(optimizer: Any) -> Any:
    """The current learning rate: a number, a variable or a tensor."""
    if hasattr(optimizer, "_get_current_learning_rate"):
        return optimizer._get_current_learning_rate()
    rate = optimizer._learning_rate                     # tf_keras
    return rate(optimizer.iterations) if callable(rate) else rate


class KerasSource(Adam):
    """The part of a Source that all backends share. It serves the optimizer, which check() accepts, as an Adam.

    Attributes:
        places: indices of the variables in the list of given gradients, which is the same on all ranks.
        _optimizer, _variables: weak references. _passes: backward passes per step, all of which advance `iterations`.
    """

    _optimizer: Callable[[], Any]
    _variables: list[Any]
    _passes: int
    places: Sequence[int] = ()

    def _moments(self, index: int) -> tuple[TensorView, TensorView]:
        """The in-place views of m and v of a variable."""
        raise NotImplementedError

    def _number(self, name: str) -> float:
        """The value of "learning rate" or "iterations" in this step."""
        raise NotImplementedError

    def fingerprint(self) -> int:
        return crc32(repr(list(self.places)).encode()) % (2**31 - 1)

    def adam(self) -> Adam:
        check(self._optimizer())
        return self

    def member(self, index: int) -> Any:
        optimizer = self._optimizer()
        decay = optimizer.weight_decay
        return AdamMember(
            *self._moments(index), int(self._number("iterations")) // self._passes, self._number("learning rate"),
            optimizer.beta_1, optimizer.beta_2, optimizer.epsilon,
            decay if decay and optimizer._use_weight_decay(self._variables[index]()) else 0.0, decoupled=True,
            eps_corrected=True,
        )

    def stepped(self, index: int) -> None:
        """Does nothing: the caller that lets the algorithm update the weights advances `iterations`, once for all."""


class Unbuilt(Source):
    """An optimizer before its first step, for algorithms that check whether they can serve it. optimizer: or None."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def adam(self) -> Any:
        check(self._optimizer)
        return Adam()
