"""State that an algorithm keeps between steps, and its form in a checkpoint.

There are two kinds, because a checkpoint may be loaded by another number of ranks:

    own      rank-local (error feedback, replicas): loaded by the same rank of equally many ranks, else recreated
    shared   equal on all ranks (an outer momentum, a projection): always loaded

State of gradients has their unit: when the loss scale changes, it is rescaled. When a step is skipped, its changes of
this state can be undone (training/model.py).
"""
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

_Value = TypeVar("_Value")


class _Plain(pickle.Unpickler):
    """Unpickles only dicts, lists, numbers, strings and bytes: a checkpoint may come from anybody."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the state of an algorithm in the checkpoint holds a {module}.{name}, which "
                                     "bagua_hvd never saves")


def to_bytes(state: dict[str, Any]) -> bytes:
    """An algorithm's state as front ends store it in their checkpoints."""
    return pickle.dumps(state, 4)


def from_bytes(stored: bytes) -> dict[str, Any]:
    """The inverse of to_bytes(). UnpicklingError: these are not bytes of a state."""
    state: dict[str, Any] = _Plain(io.BytesIO(stored)).load()
    return state


def _dumped(value: Any) -> dict[str, Any]:
    if hasattr(value, "state_dict"):
        return {"object": value.state_dict()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    return {"value": value.item() if isinstance(value, np.generic) else value}


def _take_up(value: Any, dumped: dict[str, Any]) -> Any:
    """Loads `dumped` into `value` in place, or returns another value for it; None: the dump does not fit."""
    if hasattr(value, "load_state_dict"):
        return value if "object" in dumped and value.load_state_dict(dumped["object"]) else None
    if isinstance(value, np.ndarray):
        if dumped.get("shape") != list(value.shape) or dumped.get("dtype") != value.dtype.str:
            return None
        value[...] = np.frombuffer(dumped["data"], value.dtype).reshape(value.shape)
        return value
    return dumped.get("value")


def _copied(value: Any) -> Any:
    """A copy; of an object by its copy(), if it has one."""
    return value.copy() if hasattr(value, "copy") else copy.deepcopy(value)


def _times(value: Any, factor: float) -> Any:
    if hasattr(value, "scale"):
        value.scale(factor)
        return value
    value *= factor
    return value


class State:
    """Named values: NumPy arrays, numbers, and objects with state_dict() and load_state_dict() -> whether it fits.

    Args:
        what: the owner of the state, for warnings.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._values: dict[str, Any] = {}
        self._shared: set[str] = set()
        self._scaled: set[str] = set()
        self._loaded: dict[str, Any] = {}
        self._loaded_factor = 1.0   # of scale() since loading

    def keep(self, name: str, make: Callable[[], _Value], shared: bool = False,
             fits: Callable[[_Value], bool] | None = None, scaled: bool = False) -> _Value:
        """Returns the value of this name: kept, or from a checkpoint, or made now.

        Args:
            make: function without arguments that makes the first value.
            shared: equal on all ranks; see the module.
            fits: function of a kept value; if it returns False, the value is made again.
            scaled: it has the gradients' unit; an array, or an object with scale(factor).
        """
        if scaled:
            self._scaled.add(name)
        value: _Value = self._values.get(name)      # type: ignore[assignment]  # or None
        if value is not None and (fits is None or fits(value)):
            return value
        value = make()
        if name in self._loaded:
            taken = _take_up(value, self._loaded.pop(name))
            if taken is None:
                warnings.warn(
                    f"the {name} of {self._what} in the checkpoint is of another size (another number of ranks, or "
                    "another model): it is reinitialized", stacklevel=2)
            value = make() if taken is None else taken
            if scaled and taken is not None and self._loaded_factor != 1:
                value = _times(value, self._loaded_factor)
        self._values[name] = value
        if shared:
            self._shared.add(name)
        return value

    def forget(self, name: str) -> None:
        """Drops the value of this name, also one from a checkpoint."""
        self._values.pop(name, None)
        self._loaded.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def values(self) -> list[Any]:
        """All kept values, without those of a checkpoint that nobody has asked for yet."""
        return list(self._values.values())

    def scale(self, factor: float) -> None:
        """Multiplies the values in the gradients' unit, after this unit has changed."""
        for name in self._scaled & self._values.keys():
            self._values[name] = _times(self._values[name], factor)
        self._loaded_factor *= factor

    @property
    def has_scaled(self) -> bool:
        """Whether any kept value has the gradients' unit."""
        return bool(self._scaled & self._values.keys())

    def snapshot(self) -> Callable[[], None]:
        """Copies all values. Returns a function that restores them; call it at most once."""
        values = {name: _copied(value) for name, value in self._values.items()}
        copies = values, set(self._shared), dict(self._loaded), self._loaded_factor

        def restore() -> None:
            self._values, self._shared, self._loaded, self._loaded_factor = copies

        return restore

    def zeros_like(self, name: str, values: np.ndarray, shared: bool = False, scaled: bool = False) -> np.ndarray:
        """A kept array of the size and dtype of a flat one, zeros at first; see keep()."""
        return self.keep(name, lambda: np.zeros_like(values), shared, lambda kept: kept.size == values.size, scaled)

    def loaded(self, name: str) -> bool:
        """Whether a checkpoint has this name, and nobody has asked for it yet."""
        return name in self._loaded

    def kinds(self) -> tuple[bool, bool]:
        """(whether there is rank-local state, whether there is any state), including that of a checkpoint."""
        names = self._values.keys() | self._loaded.keys()
        return bool(names - self._shared), bool(names)

    def drop(self, shared: bool) -> None:
        """Drops rank-local state, and with shared=True all state: it will be made again."""
        keep: set[str] = set() if shared else self._shared
        self._values = {name: value for name, value in self._values.items() if name in keep}
        self._loaded = {name: value for name, value in self._loaded.items() if name in keep}

    def state_dict(self, own: bool = True) -> dict[str, dict[str, Any]]:
        """The state as dicts, lists, numbers and bytes; {} if there is none. own: include rank-local state."""
        kept: dict[str, dict[str, Any]] = {"own": {}, "shared": {}}
        for name, value in self._values.items():
            kept["shared" if name in self._shared else "own"][name] = _dumped(value)
        for name, dumped in self._loaded.items():
            kept["shared" if name in self._shared else "own"][name] = dumped
        return {kind: values for kind, values in kept.items() if values and (own or kind == "shared")}

    def load_state_dict(self, state: dict[str, dict[str, Any]], own: bool) -> None:
        """Loads a state_dict(), each value when it is asked for; own: whether its rank-local state is this rank's."""
        self._values = {}
        self._loaded_factor = 1.0
        self._loaded = dict(state.get("shared", {}))
        self._shared = set(self._loaded)
        if own:
            self._loaded.update(state.get("own", {}))
