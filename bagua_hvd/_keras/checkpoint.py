"""What algorithms keep between steps, in what Keras saves: .keras, .weights.h5, and what its callbacks write.

Keras saves a part of an optimizer under that part's name. So the algorithm's state is a part, `algorithm_state`, which
holds no variables: the optimizer's own are what its class has, and plain Keras, whose optimizers have no such part,
passes it over. There the state lies as bytes:

    tree        JSON, in UTF-8: dicts as [[key, value], ...] under "dict", bytes as their number under "bytes"
    0, 1, ...   the bytes
"""
import functools
import json
from typing import Any

import keras
import numpy as np


def _to_tree(value, blobs):
    """What JSON can hold of dicts, lists, numbers and bytes; appends the bytes to `blobs`."""
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(blobs) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, _to_tree(entry, blobs)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_to_tree(entry, blobs) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_tree(tree, blob):
    """The inverse; blob: function of a number that returns the bytes."""
    if isinstance(tree, list):
        return [_from_tree(entry, blob) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if "bytes" in tree:
        return blob(tree["bytes"])
    return {key: _from_tree(entry, blob) for key, entry in tree["dict"]}


class AlgorithmState(keras.layers.Layer):
    """A part of an optimizer that Keras saves and loads. A layer only in that Keras knows how to go about it.

    Args:
        optimizer: a HasDistribution.
    """

    def __init__(self, optimizer: Any) -> None:
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
        # What was kept beside Adam's moments does not go with others.
        if "tree" in store.keys() and not self._of[2].begins_anew:      # noqa: SIM118  # a store of Keras, no dict
            tree = json.loads(store["tree"].tobytes())
            self._of[1](_from_tree(tree, lambda number: store[str(number)].tobytes()))


class HasDistribution:
    """What a distributed optimizer has beside its class: how its gradients are reduced, and its algorithm's state."""

    _settings: tuple        # what the class of the distribution is given, beside the optimizer; in the subclass
    _distribution_class: type[Any]

    @functools.cached_property      # which does not go through __setattr__, where Keras tracks what it is to save
    def distribution(self) -> Any:
        """Made when first asked for, so that from_config() of the class needs to know nothing of it."""
        return self._distribution_class(self, *self._settings)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the reduction: its gradient is this rank's, divided by the number of ranks unless
        scale_local_gradients is False."""
        self.distribution.reduction.register_local(var)

    def algorithm_state_dict(self) -> Any:
        """What the algorithm keeps on this rank, made of dicts, lists, numbers and bytes; {} when it keeps nothing."""
        states = self.distribution.reduction.state_dicts()
        return {"reductions": states} if any(states) else {}

    def load_algorithm_state_dict(self, state: Any) -> None:
        """Takes up an algorithm_state_dict(); to be called alike on all ranks, each with its own or all with one.

        What is equal on all ranks is taken up always; what is of one rank only by that rank of as many ranks, else it
        begins anew on all ranks. {}: leaves all as it is.
        """
        if state:
            self.distribution.reduction.load_state_dicts(state["reductions"])
