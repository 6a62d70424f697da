"""Which files a gradient passes: those with a function that is handed it, or returns it, as a profiler sees them."""
import sys
from contextlib import contextmanager
from pathlib import Path

import bagua_hvd

PACKAGE = Path(bagua_hvd.__file__).parent
# What a gradient is on its way: a framework's tensor (of torch the parameter that has it), the core's view of its
# memory, a bucket that holds such views.
FORMS = {"Parameter", "Tensor", "SymbolicTensor", "EagerTensor", "TensorView", "Bucket"}


def holds(value):
    if type(value).__name__ in FORMS:
        return True
    return isinstance(value, (list, tuple)) and any(map(holds, value))


@contextmanager
def walked(found):
    """Within it, on this thread: `found`, a dict of files, gets the names of their functions that are handed it."""
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
