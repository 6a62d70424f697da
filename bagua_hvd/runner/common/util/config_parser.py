"""From a config file to flags, and from flags to the environment variables that the ranks read."""

from bagua_hvd.core.variables import LOG_LEVELS, MIB


def _switch(value):
    return "1" if value else "0"


def _text(value):
    return str(value)


# (attribute of the parsed arguments, variable, how the value is written)
_VARIABLES = (
    ("algorithm", "BAGUA_ALGORITHM", _text),
    ("start_timeout", "HOROVOD_START_TIMEOUT", _text),
    ("grace_seconds", "BAGUA_HVD_GRACE_SECONDS", _text),
    ("elastic_timeout", "HOROVOD_ELASTIC_TIMEOUT", _text),
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", lambda mb: str(mb * MIB)),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME", _text),
    ("cache_capacity", "HOROVOD_CACHE_CAPACITY", _text),
    ("hierarchical_allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", _switch),
    ("hierarchical_allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", _switch),
    ("torus_allreduce", "HOROVOD_TORUS_ALLREDUCE", _switch),
    ("autotune", "HOROVOD_AUTOTUNE", _switch),
    ("autotune_log_file", "HOROVOD_AUTOTUNE_LOG", _text),
    ("autotune_warmup_samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", _text),
    ("autotune_steps_per_sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", _text),
    ("autotune_bayes_opt_max_samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _text),
    ("autotune_gaussian_process_noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _text),
    ("timeline_filename", "HOROVOD_TIMELINE", _text),
    ("timeline_mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES", _switch),
    ("no_stall_check", "HOROVOD_STALL_CHECK_DISABLE", _switch),
    ("stall_check_warning_time_seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", _text),
    ("stall_check_shutdown_time_seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _text),
    ("mpi_threads_disable", "HOROVOD_MPI_THREADS_DISABLE", _switch),
    ("num_nccl_streams", "HOROVOD_NUM_NCCL_STREAMS", _text),
    ("thread_affinity", "HOROVOD_THREAD_AFFINITY", _text),
    ("gloo_timeout_seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _text),
    ("log_level", "HOROVOD_LOG_LEVEL", _text),
    ("log_with_timestamp", "HOROVOD_LOG_HIDE_TIME", lambda shown: _switch(not shown)),
    ("tcp_flag", "NCCL_IB_DISABLE", _switch),
)

# (attribute, key of the config file, type of its value). stall_check.enabled and controller are special.
_CONFIG = (
    ("fusion_threshold_mb", "params.fusion_threshold_mb", int),
    ("cycle_time_ms", "params.cycle_time_ms", float),
    ("cache_capacity", "params.cache_capacity", int),
    ("hierarchical_allreduce", "params.hierarchical_allreduce", bool),
    ("hierarchical_allgather", "params.hierarchical_allgather", bool),
    ("torus_allreduce", "params.torus_allreduce", bool),
    ("algorithm", "params.algorithm", str),
    ("autotune", "autotune.enabled", bool),
    ("autotune_log_file", "autotune.log_file", str),
    ("autotune_warmup_samples", "autotune.warmup_samples", int),
    ("autotune_steps_per_sample", "autotune.steps_per_sample", int),
    ("autotune_bayes_opt_max_samples", "autotune.bayes_opt_max_samples", int),
    ("autotune_gaussian_process_noise", "autotune.gaussian_process_noise", float),
    ("timeline_filename", "timeline.filename", str),
    ("timeline_mark_cycles", "timeline.mark_cycles", bool),
    ("no_stall_check", "stall_check.enabled", bool),
    ("stall_check_warning_time_seconds", "stall_check.warning_time_seconds", int),
    ("stall_check_shutdown_time_seconds", "stall_check.shutdown_time_seconds", int),
    ("mpi_threads_disable", "library_options.mpi_threads_disable", bool),
    ("num_nccl_streams", "library_options.num_nccl_streams", int),
    ("thread_affinity", "library_options.thread_affinity", str),
    ("gloo_timeout_seconds", "library_options.gloo_timeout_seconds", int),
    ("log_level", "logging.level", str),
    ("log_with_timestamp", "logging.with_timestamp", bool),
)
_CONTROLLERS = ("gloo", "mpi")
_DESCRIPTIONS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def set_args_from_config(args, config, override_args):
    """Sets the arguments that a config file names and the command line does not.

    Args:
        args: the parsed arguments, changed in place.
        config: the file's mapping, as YAML reads it.
        override_args: names of attributes that keep their value.
    Returns:
        Keys of the file that no flag has.
    Raises:
        ValueError: a value of a wrong type, or an unknown controller; the key is named.
    """
    values = _flat(config)
    for attribute, key, kind in _CONFIG:
        if values.get(key) is not None and attribute not in override_args:
            value = _typed(key, values[key], kind)
            setattr(args, attribute, not value if attribute == "no_stall_check" else value)
    controller = values.get("controller")
    if controller is not None and not {"use_gloo", "use_mpi", "use_jsrun"} & set(override_args):
        if str(controller).lower() not in _CONTROLLERS:
            raise ValueError(f"config key controller: {controller!r} is none of {', '.join(_CONTROLLERS)}")
        setattr(args, f"use_{controller.lower()}", True)
    return sorted(values.keys() - {key for _, key, _ in _CONFIG} - {"controller"})


def _flat(config):
    """{"section.key": value}."""
    if not isinstance(config, dict):
        raise ValueError("a config file holds sections such as params, with keys in them")
    values = {}
    for section, content in config.items():
        if isinstance(content, dict):
            values.update({f"{section}.{key}": value for key, value in content.items()})
        else:
            values[str(section)] = content
    return values


def _typed(key, value, kind):
    if kind is str and isinstance(value, (int, str)) and not isinstance(value, bool):
        value = str(value)
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"config key {key}: {value!r} is not {_DESCRIPTIONS[kind]}")
    return value


def validate_config_args(args):
    """ValueError, naming the flag and the remedy, for values that are wrong by themselves or together."""
    for attribute, low in (("fusion_threshold_mb", 0), ("cycle_time_ms", 0), ("cache_capacity", 0),
                           ("stall_check_warning_time_seconds", 0), ("stall_check_shutdown_time_seconds", 0),
                           ("autotune_warmup_samples", 0), ("autotune_steps_per_sample", 1),
                           ("autotune_bayes_opt_max_samples", 1), ("autotune_gaussian_process_noise", 0),
                           ("num_nccl_streams", 1), ("elastic_timeout", 1), ("reset_limit", 0),
                           ("start_timeout", 1), ("grace_seconds", 0), ("gloo_timeout_seconds", 1)):
        value = getattr(args, attribute, None)
        if value is not None and not low <= value < float("inf"):
            raise ValueError(f"--{attribute.replace('_', '-')} {value}: give {low} or more")
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and noise > 1:
        raise ValueError(f"--autotune-gaussian-process-noise {noise}: give 0 to 1")
    level = getattr(args, "log_level", None)
    if level is not None and level.upper() not in LOG_LEVELS:
        raise ValueError(f"{level!r} is not a log level: give one of {', '.join(LOG_LEVELS)}")
    cooldown = getattr(args, "cooldown_range", None)
    if cooldown is not None and not 1 <= cooldown[0] <= cooldown[1] <= 3600:
        raise ValueError(f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: give MIN and MAX with "
                         "1 <= MIN <= MAX <= 3600")
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
