"""Keeps torch.compile out of functions that users or torch call, and explains wrong arguments of failed calls."""
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from bagua_hvd.collectives.arguments import arguments_of, wrong_option
from bagua_hvd.core.exceptions import HorovodInternalError

_TENSORS = "a sequence of torch.Tensor"


def _tensors_of(name, value):
    """The parts of argument `name` that must be tensors. Raises TypeError if it cannot hold any."""
    if name == "tensor":
        return [value]
    if name == "tensors":
        if isinstance(value, str | Mapping | Iterator):     # an iterator is used up, and its items are unknown
            raise TypeError
        return list(value)
    if name == "params":
        entries = value.values() if isinstance(value, Mapping) else value
        return [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in entries if entry is not None]
    return []


def _wrong_tensor(function, args, kwargs):
    """An error that names the wrong argument of a call of `function`; None if all tensors are right."""
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


def eager(function: Callable[..., Any]) -> Any:
    """Decorator: torch.compile breaks the graph at a call of `function` and traces nothing inside it.

    Collectives work on addresses and objects of the core, which a compiler cannot trace. A call that is not being
    compiled avoids torch.compiler.disable, because that imports the compiler, which takes two seconds.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except HorovodInternalError:
            raise
        except (AttributeError, RuntimeError, TypeError) as error:      # of Python or PyTorch
            reason = wrong_option(function, args, kwargs) or _wrong_tensor(function, args, kwargs)
            if reason is None:
                raise
            raise reason from error

    return call


def uncompiled(function: Callable[..., Any]) -> Any:
    """Decorator for functions that torch itself calls, such as hooks: neither they nor their callees are compiled.

    Like eager(), but it informs the compiler once, when the function is made, and calls cost nothing.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:         # an older torch
        return eager(function)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
