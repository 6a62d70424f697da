"""The error of an import without the native core, and that common/ imports no framework."""
import hashlib
import hmac
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from bagua_hvd.core import context, native, operations
from bagua_hvd.core.native import ffi

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


def test_proofs_of_the_secret():
    """By the equation in native/transport/auth.h; what one rank sends is what the other expects."""
    def proofs_of(secret, rank, endpoints):
        gatherer = SimpleNamespace(gather=lambda own: b"".join(endpoints), secret=secret)
        handle, everything = ffi.new_handle(gatherer), ffi.new("char[]", 8 * len(endpoints))
        proofs = ffi.new("struct bhvd_proofs[]", len(endpoints))
        mine = ffi.from_buffer(endpoints[rank])
        assert context._gather(handle, mine, 8, everything, proofs, ffi.new("struct bhvd_error *")) == native.OK
        assert bytes(ffi.buffer(everything)) == b"".join(endpoints)
        return [tuple(bytes(ffi.buffer(way)) for way in (each.sent, each.received)) for each in proofs]

    endpoints = [b"rank 0..", b"rank 1..", b"rank 2.."]
    of_0, of_2 = (proofs_of(b"secret", rank, endpoints) for rank in (0, 2))
    assert of_0[2] == of_2[0][::-1]
    key = hmac.digest(b"secret", b"rank 2..rank 0..", "sha256")
    assert of_2[0][0] == hashlib.shake_256(key).digest(10 * 32)
    others = [proofs_of(b"another", 0, endpoints), proofs_of(b"secret", 0, [*endpoints[:2], b"port 7.."])]
    seen = {proof[i:i + 32] for job in (of_0, *others) for proof in job[2] for i in range(0, len(proof), 32)}
    assert len(seen) == 3 * 2 * 10              # another secret, endpoint, direction or channel: another proof


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
