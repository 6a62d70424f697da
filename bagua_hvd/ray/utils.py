"""Functions for Ray's own HorovodTrainer (Ray Train V1). No search for interfaces: the rendezvous shows them."""
from typing import Any

from bagua_hvd.job.probe import interface_names


def detect_nics(settings: Any, all_host_names: Any = None, node_workers: Any = None) -> set[str]:
    """The interfaces named by the settings; empty: each rank uses the one towards the rendezvous."""
    return set(interface_names(settings.nics) or ())


def nics_to_env_var(nics: Any) -> dict[str, str]:
    """The variables that limit the ranks to these interfaces, see interface_names(); empty for none."""
    names = ",".join(sorted(interface_names(nics) or ()))
    return {"HOROVOD_GLOO_IFACE": names, "NCCL_SOCKET_IFNAME": names} if names else {}
