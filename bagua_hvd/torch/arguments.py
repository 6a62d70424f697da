"""Explains wrong arguments. Runs only after a call has failed, so that correct calls pay nothing."""
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bagua_hvd.collectives.arguments import arguments_of, wrong_option
from bagua_hvd.core.exceptions import HorovodInternalError

_TENSORS = "a sequence of torch.Tensor"

def _tensors_of(name, value):
    """The parts of argument `name` that must be tensors. Raises TypeError if it cannot hold any."""
    if name == "tensor":
        return [value]
    if name == "tensors":
        if isinstance(value, str | Iterator):       # an iterator is used up, and its items are unknown
            raise TypeError
        return list(value)
    if name == "params":
        entries = value.values() if isinstance(value, Mapping) else value
        return [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in entries if entry is not None]
    return []


def _wrong_tensor(function, args, kwargs):
    for name, value in arguments_of(function, args, kwargs).items():
        takes = _TENSORS if name != "tensor" else "a torch.Tensor"
        try:
            tensors = _tensors_of(name, value)
        except (TypeError, RuntimeError):       # RuntimeError: PyTorch's, for a nested tensor
            return TypeError(f"{function.__name__}() takes {takes} as `{name}`, not {type(value).__name__}")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                return TypeError(f"{function.__name__}() takes {takes} as `{name}`, not {type(tensor).__name__}")
            if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
                return ValueError(f"{function.__name__}() takes dense tensors in memory, not one of layout "
                                  f"{tensor.layout} on {tensor.device}{', nested' if tensor.is_nested else ''}")
    return None


def explained(function: Callable[..., Any], args: Any, kwargs: Any, error: Any) -> Any:
    """The exception to raise for an error of Python or PyTorch from a call of `function`.

    Returns:
        A TypeError or ValueError that names the argument; the error itself if the arguments are right.
    """
    if isinstance(error, HorovodInternalError):
        return error
    return wrong_option(function, args, kwargs) or _wrong_tensor(function, args, kwargs) or error
