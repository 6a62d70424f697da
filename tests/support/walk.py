"""The files that a gradient passes through: those with a function that takes or returns it, found by a profiler."""
import sys
from contextlib import contextmanager
from pathlib import Path

import bagua_hvd

PACKAGE = Path(bagua_hvd.__file__).parent
# The forms of a gradient: a framework's tensor (in torch also its parameter), the core's view of its memory, a bucket
# with such views.
FORMS = {"Parameter", "Tensor", "SymbolicTensor", "EagerTensor", "TensorView", "Bucket"}


def holds(value):
    if type(value).__name__ in FORMS:
        return True
    return isinstance(value, (list, tuple)) and any(map(holds, value))


@contextmanager
def walked(found):
    """On this thread, adds to `found`, a dict of files, the names of their functions that take or return gradients."""
    def see(frame, event, result):
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        handed = [result] if event == "return" else [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if any(map(holds, handed)):
            found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(code.co_name)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
