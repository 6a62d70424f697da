"""For tests of all registered algorithms: arguments that make each one's effect visible within a few steps."""
from bagua_hvd import algorithms

NAMES = tuple(algorithms.names())
ASYNC = {name for name in NAMES if algorithms.get(name).asynchronous}
ADAM = {name for name in NAMES if algorithms.get(name).uses_adam}
# Their gradients stay on their ranks, except in warm-ups.
LOCAL = {name for name in NAMES if algorithms.get(name).models_differ}
ARGUMENTS = {
    "powersgd": {"rank": 1, "warmup_steps": 0},
    "diloco": {"communication_interval": 2, "fragments": 2, "outer_momentum": 0.5, "error_feedback": True},
    "local_sgd": {"communication_interval": 2},
    **{name: {"sync_interval_ms": 0, "max_staleness": 2} for name in ASYNC},
}


def make(name, **arguments):
    """The algorithm with its test arguments."""
    return algorithms.get(name, **ARGUMENTS.get(name, {}), **arguments)
