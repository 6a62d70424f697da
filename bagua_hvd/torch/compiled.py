"""What torch.compile leaves alone, and users call: what they give wrongly gets a sentence (arguments.py)."""
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from bagua_hvd.torch.arguments import explained


def eager(function: Callable[..., Any]) -> Any:
    """Decorator: a compiled function breaks its graph where it calls `function`, and nothing in there is traced.

    Collectives work on addresses, and on objects of the core, of which a compiler can make nothing. Not
    torch.compiler.disable for every call: it would import the compiler, two seconds of it.
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
    """Decorator for what torch calls by itself, as hooks: neither it nor what it calls is ever compiled.

    As eager(), but the compiler is told once, when the function is made, and a call costs nothing.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:         # an older torch
        return eager(function)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
