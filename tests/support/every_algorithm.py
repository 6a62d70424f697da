"""What tests of all registered algorithms need to know of each: arguments by which a few steps show what it does."""
from bagua_hvd import algorithms
from bagua_hvd.algorithms import research  # noqa: F401  (registers its names)

NAMES = tuple(algorithms.names())
ASYNC = {name for name in NAMES if algorithms.get(name).asynchronous}
ADAM = {name for name in NAMES if algorithms.get(name).uses_adam}
# Whose gradients stay on their ranks, but for warm-ups.
LOCAL = {name for name in NAMES if algorithms.get(name).models_differ}
ARGUMENTS = {
    "zero_one_adam": {"variance_steps": 3, "full_steps": 3, "local_scaler": 2, "max_interval": 2},
    "powersgd": {"rank": 1, "warmup_steps": 0}, "diloco": {"communication_interval": 2, "outer_momentum": 0.5},
    "streaming_diloco": {"communication_interval": 2, "fragments": 2, "outer_momentum": 0.5, "error_feedback": True},
    "local_sgd": {"communication_interval": 2},
    "local_adam": {"communication_interval": 2, "momentum_interval": 1, "variance_interval": 3},
    **{name: {"sync_interval_ms": 0, "max_staleness": 2} for name in ASYNC},
}


def make(name, **arguments):
    """The algorithm."""
    return algorithms.get(name, **ARGUMENTS.get(name, {}), **arguments)
