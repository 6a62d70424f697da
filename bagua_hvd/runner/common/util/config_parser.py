"""Converts a config file to flags, and flags to the ranks' environment variables, by the table in runner/flags.py."""
from argparse import Namespace
from collections.abc import Collection
from typing import Any

from bagua_hvd.core.variables import LOG_LEVELS as LOG_LEVELS
from bagua_hvd.runner.flags import SWITCH, TABLE, Flag

_CONTROLLERS = ("gloo", "mpi")


def set_args_from_config(args: Namespace, config: object, override_args: Collection[str]) -> list[str]:
    """Sets the arguments that a config file names and the command line does not.

    Args:
        args: the parsed arguments, changed in place.
        config: the file's mapping, as YAML reads it.
        override_args: names of attributes that keep their value.
    Returns:
        Keys of the file that match no flag.
    Raises:
        ValueError: a value of a wrong type, or an unknown controller; the message names the key.
    """
    values = _flat(config)
    keys = {flag.key.lstrip("!"): flag for flag in TABLE.values() if flag.key}
    for key, flag in keys.items():
        if values.get(key) is not None and flag.attribute not in override_args:
            value = _typed(flag, key, values[key])
            setattr(args, flag.attribute, not value if flag.key.startswith("!") else value)
    controller = values.get("controller")
    if controller is not None and not {"use_gloo", "use_mpi", "use_jsrun"} & set(override_args):
        if str(controller).lower() not in _CONTROLLERS:
            raise ValueError(f"config key controller: {controller!r} is none of {', '.join(_CONTROLLERS)}")
        setattr(args, f"use_{controller.lower()}", True)
    return sorted(values.keys() - keys.keys() - {"controller"})


def _flat(config: object) -> dict[str, Any]:
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


def _typed(flag: Flag, key: str, value: object) -> Any:
    # YAML must have parsed a bool for a switch, and for nothing else.
    if isinstance(value, bool) != (flag.kind is SWITCH) or not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"config key {key}: {value!r}: expected {flag.kind.expected}")
    try:
        return flag.parse(str(value))
    except ValueError as error:
        raise ValueError(f"config key {key}: {error}") from None


def validate_config_args(args: Namespace) -> None:
    """ValueError, naming the flag and the remedy, for values that are wrong by themselves or in combination."""
    for attribute, flag in TABLE.items():
        value = getattr(args, attribute, None)
        if value is None or flag.kind is SWITCH:
            continue
        try:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                flag.parse(str(one))
        except ValueError as error:
            raise ValueError(f"{flag.name} {error}") from None
    cooldown = getattr(args, "cooldown_range", None)
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise ValueError(f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: give MIN and MAX with "
                         "1 <= MIN <= MAX <= 3600")
    warning = getattr(args, "stall_check_warning_time_seconds", None)
    shutdown = getattr(args, "stall_check_shutdown_time_seconds", None)
    # If one of them comes from the environment, init() checks them.
    if shutdown and warning is not None and shutdown < warning:
        raise ValueError(f"--stall-check-shutdown-time-seconds {shutdown} is below the warning time of {warning} s: "
                         "raise it, or lower --stall-check-warning-time-seconds")


def set_env_from_args(env: dict[str, str], args: Namespace) -> dict[str, str]:
    """Sets in `env` the variable of every given flag; returns `env`. Other variables keep the user's values."""
    for attribute, flag in TABLE.items():
        value = getattr(args, attribute, None)
        if value is None or not flag.variable:
            continue
        if flag.kind is SWITCH:
            value = int(bool(value) != flag.variable.startswith("!"))
        text = ",".join(value) if isinstance(value, list) else str(value * flag.unit if flag.unit != 1 else value)
        env[flag.variable.lstrip("!")] = text
    return env
