"""Python objects as text that an environment variable or a command line can hold."""
import base64
from typing import Any

import cloudpickle


def dumps_base64(obj: object) -> str:
    """The object, pickled by cloudpickle, as base64 text."""
    return base64.b64encode(cloudpickle.dumps(obj)).decode("ascii")


def loads_base64(encoded: str) -> Any:
    """Undoes dumps_base64(). Only for text of the caller's own job: unpickling may run code."""
    return cloudpickle.loads(base64.b64decode(encoded))
