"""Lightning under the name that the program uses: classes of `lightning` and `pytorch_lightning` do not mix."""
import importlib
import importlib.util
import sys
from types import ModuleType

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
