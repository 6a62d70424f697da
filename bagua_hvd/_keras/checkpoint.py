"""Puts algorithms' state into the files that Keras and its callbacks save: .keras and .weights.h5.

Keras saves a part of an optimizer under the part's name. So the algorithm's state is a part, `algorithm_state`, without
variables: the optimizer's own variables stay those of its class, and plain Keras, whose optimizers have no such part,
skips it. The part stores the state as bytes:

    tree        JSON, in UTF-8: dicts as [[key, value], ...] under "dict", bytes as their number under "bytes"
    0, 1, ...   the bytes
"""
import functools
import json
from typing import Any

import keras
import numpy as np


def _to_tree(value, blobs):
    """Converts dicts, lists, numbers and bytes to JSON values; appends the bytes to `blobs`."""
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(blobs) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, _to_tree(entry, blobs)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_to_tree(entry, blobs) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_tree(tree, blob):
    """The inverse of _to_tree(). blob: function of a number that returns the bytes."""
    if isinstance(tree, list):
        return [_from_tree(entry, blob) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if "bytes" in tree:
        return blob(tree["bytes"])
    return {key: _from_tree(entry, blob) for key, entry in tree["dict"]}


class AlgorithmState(keras.layers.Layer):
    """A part of an optimizer that Keras saves and loads. It is a layer only because Keras can save layers."""

    def __init__(self, optimizer: "HasDistribution") -> None:
        super().__init__()
        self._of = (optimizer.algorithm_state_dict, optimizer.load_algorithm_state_dict, optimizer.distribution)

    def save_own_variables(self, store: Any) -> None:
        state = self._of[0]()
        if not state:
            return
        blobs: list[bytes] = []
        tree = json.dumps(_to_tree(state, blobs)).encode()
        for name, data in (("tree", tree), *((str(i), blob) for i, blob in enumerate(blobs))):
            store[name] = np.frombuffer(data, np.uint8)

    def load_own_variables(self, store: Any) -> None:
        # State saved with Adam's moments must not be combined with other moments.
        if "tree" in store.keys() and not self._of[2].state_skipped:    # noqa: SIM118  # a store of Keras, no dict
            tree = json.loads(store["tree"].tobytes())
            self._of[1](_from_tree(tree, lambda number: store[str(number)].tobytes()))


class HasDistribution:
    """Adds to an optimizer's class the reduction of its gradients and its algorithm's state."""

    _settings: tuple        # further arguments of the distribution's class; set in the subclass
    _distribution_class: type[Any]

    @functools.cached_property      # bypasses __setattr__, where Keras tracks the parts that it saves
    def distribution(self) -> Any:
        """Made on first use, so that from_config() of the class need not know it."""
        return self._distribution_class(self, *self._settings)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the reduction. Its gradient stays this rank's, divided by the number of ranks unless
        scale_local_gradients is False."""
        self.distribution.reduction.register_local(var)

    def set_weight(self, weight: Any) -> None:
        """Makes the next average a weighted one: sum of w_i g_i / sum of w_i over the ranks, instead of equal weights.

            def train_step(self, data):
                self.optimizer.set_weight(keras.ops.shape(data[0])[0])
                return super().train_step(data)

        Args:
            weight: number of samples or tokens that this rank's gradients are the mean over, a number or a scalar
                tensor; 0: this rank adds nothing. All ranks must give it, in each weighted step; with
                backward_passes_per_step it holds for the whole window, and is given in the last pass.
        Raises:
            ValueError: from apply(): op is not Average; the algorithm does not average gradients in every step; a
                graph is traced, and this was called outside of it. On all ranks (on TensorFlow as
                tf.errors.InvalidArgumentError): a weight is negative or not finite, or all are 0.
        """
        self.distribution.reduction.set_weight(weight)

    def algorithm_state_dict(self) -> Any:
        """The algorithm's state on this rank, made of dicts, lists, numbers and bytes; {} if there is none."""
        states = self.distribution.reduction.state_dicts()
        return {"reductions": states} if any(states) else {}

    def load_algorithm_state_dict(self, state: Any) -> None:
        """Restores an algorithm_state_dict(); all ranks must call it, each with its own or all with the same one.

        State that is equal on all ranks is always restored. State of one rank is restored only by that rank, and only
        if the number of ranks is unchanged; else it starts anew on all ranks. {}: changes nothing.
        """
        if state:
            self.distribution.reduction.load_state_dicts(state["reductions"])
