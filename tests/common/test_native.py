"""The error of an import without the native core, and that common/ imports no framework."""
import subprocess
import sys
from pathlib import Path

from bagua_hvd.core import native, operations

ROOT = Path(__file__).resolve().parents[2]


def run(source):
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_the_error_names_the_remedy():
    result = run(
        "import sys\n"
        "sys.modules['bagua_hvd._native'] = None\n"     # as if not built
        "import bagua_hvd.job.basics"
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the native extension of bagua_hvd is not built: run `pip install .`"), last


def test_common_imports_no_framework():
    result = run(
        "import sys\n"
        "import bagua_hvd.collectives.rules, bagua_hvd.core.objects, bagua_hvd.core.util\n"
        "print([name for name in ('torch', 'tensorflow', 'numpy') if name in sys.modules])"
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_tensors_cross_as_they_are():
    views = [native.TensorView(1 << 63, 0, (), native.FLOAT32, None),
             native.TensorView(3, 4, (5, 0, 1 << 40), native.BFLOAT16, None), native.TensorView(7, 7, (9,), 0, None)]
    array, _shapes = operations.tensor_array(views)
    for entry, view in zip(array, views, strict=True):
        assert [int(native.ffi.cast("uintptr_t", pointer)) for pointer in (entry.src, entry.dst)] == list(view[:2])
        assert tuple(entry.shape[i] for i in range(entry.ndim)) == view.shape
        assert (entry.dtype, entry.dst_on_host) == (view.dtype, 0)
    assert native.ffi.typeof("struct bhvd_tensor[]").item.fields[-1][0] == "dst_on_host"    # the last field
    assert len(operations.tensor_array([])[0]) == 0
