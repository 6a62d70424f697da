"""Keeps torch.compile out of functions that users or torch call, and explains wrong arguments (arguments.py)."""
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from bagua_hvd.torch.arguments import explained


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
        except (AttributeError, RuntimeError, TypeError) as error:
            reason = explained(function, args, kwargs, error)
            if reason is error:
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
