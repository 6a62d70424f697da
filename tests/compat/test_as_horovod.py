"""import bagua_hvd.as_horovod; each case runs in its own Python process."""
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code, folder=None):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder or ROOT)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_modules_are_the_same_objects():
    run("""
import bagua_hvd, sys
import bagua_hvd.as_horovod
import horovod
assert horovod is bagua_hvd and "torch" not in sys.modules
spec, loader = bagua_hvd.__spec__, bagua_hvd.__loader__
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
import bagua_hvd.core.exceptions, horovod.common.util as util
from horovod import data
assert HorovodInternalError is bagua_hvd.core.exceptions.HorovodInternalError
assert data is sys.modules["bagua_hvd.data"] and horovod.__version__ == bagua_hvd.__version__ == "0.28.1"
import horovod.data.data_loader_base, bagua_hvd.runner.launch, horovod.runner.launch
assert horovod.runner.launch is bagua_hvd.runner.launch
for name, module in list(sys.modules.items()):
    if name.startswith("horovod."):
        assert module is sys.modules["bagua_hvd" + name[7:]]
        assert module.__name__ == module.__spec__.name == "bagua_hvd" + name[7:]
        assert not module.__spec__._initializing
assert bagua_hvd.__spec__ is spec and bagua_hvd.__loader__ is loader
""")


def test_torch():
    pytest.importorskip("torch")
    run("""
import bagua_hvd.as_horovod
import horovod.torch as hvd
import bagua_hvd.torch, pickle
from horovod.torch.mpi_ops import allreduce
from horovod.torch.elastic.state import TorchState
assert hvd is bagua_hvd.torch and hvd.mpi_ops is bagua_hvd.torch.mpi_ops and allreduce is bagua_hvd.torch.allreduce
import horovod.torch.elastic
assert horovod.torch.elastic is hvd.elastic and TorchState is hvd.elastic.TorchState
hvd.init()
assert hvd.size() == 1 and bagua_hvd.torch.is_initialized()
""")


def test_missing_modules():
    out = run("""
import bagua_hvd.as_horovod, importlib
for name in ("horovod.nothing", "horovod.common.nothing", "horovod.nothing.more"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "bagua_hvd" in str(error), error
        print(error.name, "|", error)
    else:
        raise AssertionError(name)
try:
    from horovod import nothing
except ImportError as error:
    assert "bagua_hvd" in str(error)
try:
    import horovodless
except ModuleNotFoundError as error:
    assert "bagua_hvd" not in str(error)
""")
    assert out.splitlines()[0] == (
        "horovod.nothing | No module named 'horovod.nothing': bagua_hvd stands in for horovod and has no "
        "'bagua_hvd.nothing'")


def test_refuses_when_a_real_one_is_imported_and_hides_one_that_is_not(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    (tmp_path / "horovod" / "only_there.py").write_text("")
    run(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import horovod
assert "only" not in dir(horovod) and horovod.__file__.startswith({str(tmp_path)!r})
for _ in range(2):
    try:
        import bagua_hvd.as_horovod
    except ImportError as error:
        assert str(error).count(".") >= 1 and horovod.__file__ in str(error)
        assert "has been imported already" in str(error)
    else:
        raise AssertionError
assert not any("Horovod" in type(finder).__name__ for finder in sys.meta_path)
""", tmp_path)
    run(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import bagua_hvd.as_horovod, horovod
assert horovod is bagua_hvd
try:
    import horovod.only_there
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
""", tmp_path)


def test_idempotent():
    run("""
import importlib, sys
import bagua_hvd.as_horovod
count = len(sys.meta_path)
importlib.reload(bagua_hvd.as_horovod)
import horovod.as_horovod
assert len(sys.meta_path) == count
assert horovod.as_horovod is bagua_hvd.as_horovod
""")
