"""From flags to the environment variables that the ranks read."""

LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]

_MIB = 1 << 20


def _switch(value):
    return "1" if value else "0"


# (attribute of the parsed arguments, variable, how the value is written)
_VARIABLES = (
    ("algorithm", "BAGUA_ALGORITHM", str),
    ("start_timeout", "HOROVOD_START_TIMEOUT", str),
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", lambda mb: str(mb * _MIB)),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME", str),
    ("cache_capacity", "HOROVOD_CACHE_CAPACITY", str),
    ("timeline_filename", "HOROVOD_TIMELINE", str),
    ("no_stall_check", "HOROVOD_STALL_CHECK_DISABLE", _switch),
    ("stall_check_warning_time_seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", str),
    ("stall_check_shutdown_time_seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str),
    ("gloo_timeout_seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", str),
    ("log_level", "HOROVOD_LOG_LEVEL", str),
)


def validate_config_args(args):
    """ValueError, naming the flag and the remedy, for values that are wrong by themselves or together."""
    for attribute, low in (("fusion_threshold_mb", 0), ("cycle_time_ms", 0), ("cache_capacity", 0),
                           ("stall_check_warning_time_seconds", 0), ("stall_check_shutdown_time_seconds", 0),
                           ("start_timeout", 1), ("gloo_timeout_seconds", 1)):
        value = getattr(args, attribute, None)
        if value is not None and not low <= value < float("inf"):
            raise ValueError(f"--{attribute.replace('_', '-')} {value}: give {low} or more")
    warning = getattr(args, "stall_check_warning_time_seconds", None)
    shutdown = getattr(args, "stall_check_shutdown_time_seconds", None)
    # With one of them from the environment, init() judges.
    if shutdown and warning is not None and shutdown < warning:
        raise ValueError(f"--stall-check-shutdown-time-seconds {shutdown} is below the warning time of {warning} s: "
                         "raise it, or lower --stall-check-warning-time-seconds")


def set_env_from_args(env, args):
    """Sets in `env` the variable of every flag that was given; returns `env`. Others keep what the user exported."""
    for attribute, variable, write in _VARIABLES:
        value = getattr(args, attribute, None)
        if value is not None:
            env[variable] = write(value)
    return env
