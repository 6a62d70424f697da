"""What torch.compile leaves alone."""
import functools

import torch
from torch.compiler import is_dynamo_compiling


def eager(function):
    """Decorator: a compiled function breaks its graph where it calls `function`, and nothing in there is traced.

    Collectives work on addresses, and on objects of the core, of which a compiler can make nothing. Not
    torch.compiler.disable for every call: it would import the compiler, two seconds of it.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
