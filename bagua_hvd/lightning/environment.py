"""Lightning's packages, under the name that the program uses, and its ClusterEnvironment for ranks of baguarun."""
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import basics
from bagua_hvd.job.environment import local_address_towards, resolve
from bagua_hvd.job.server import EVERY_INTERFACE, listen
from bagua_hvd.torch.functions import broadcast_object

# Classes of `lightning` and `pytorch_lightning` do not mix.
_ROOTS = {"lightning": ("lightning.pytorch", "lightning.fabric"),
          "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


def _root() -> tuple[str, str]:
    imported = [root for root in _ROOTS if root in sys.modules]
    installed = [root for root in _ROOTS if importlib.util.find_spec(root)]
    if not installed:
        raise ImportError("bagua_hvd.lightning needs lightning, or pytorch_lightning: pip install lightning")
    return _ROOTS[(imported or installed)[0]]


_PYTORCH, _FABRIC = _root()


def of_pytorch(module: str) -> ModuleType:
    """A module of lightning.pytorch, by its path there; "": the package itself."""
    return importlib.import_module(f"{_PYTORCH}.{module}" if module else _PYTORCH)


def of_fabric(module: str) -> ModuleType:
    """A module of lightning.fabric."""
    return importlib.import_module(f"{_FABRIC}.{module}" if module else _FABRIC)


ClusterEnvironment: Any = of_fabric("plugins.environments").ClusterEnvironment


class BaguarunEnvironment(ClusterEnvironment):
    """Ranks that baguarun has started, `baguarun -np 4 python train.py`; the strategies detect it.

    torch.distributed connects at rank 0's host, at a port that rank 0 chooses on first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._main: tuple[str, int] | None = None

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank of baguarun."""
        return variables.given("HOROVOD_RANK") and basics.placed_by_baguarun()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def _rendezvous(self) -> tuple[str, int]:
        if self._main is None:
            basics.init()
            mine, rendezvous = None, variables.read("HOROVOD_GLOO_RENDEZVOUS_ADDR") or "127.0.0.1"
            if basics.rank() == 0:
                # The last free one: other listeners of this job take the first one.
                with listen(EVERY_INTERFACE, variables.read("BAGUA_HVD_PORTS")[::-1]) as free:
                    mine = local_address_towards(resolve(rendezvous)), free.getsockname()[1]
            self._main = broadcast_object(mine, 0, name="lightning.main")
        return self._main

    @property
    def main_address(self) -> str:
        return self._rendezvous()[0]

    @property
    def main_port(self) -> int:
        return self._rendezvous()[1]

    def world_size(self) -> int:
        basics.init()
        return basics.size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher's number applies; see validate_settings()."""

    def global_rank(self) -> int:
        basics.init()
        return basics.rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher's number applies."""

    def local_rank(self) -> int:
        basics.init()
        return basics.local_rank()

    def node_rank(self) -> int:
        basics.init()
        return basics.cross_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError if the Trainer's numbers are not baguarun's."""
        basics.init()
        if num_devices * num_nodes != basics.size() or num_devices != basics.local_size():
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} make {num_devices * num_nodes} ranks, but baguarun "
                f"has started {basics.size()}, {basics.local_size()} of them on this host: give it "
                f"-np {num_devices * num_nodes}, or the Trainer devices={basics.local_size()} and num_nodes="
                f"{basics.size() // basics.local_size()}"
            )
