"""For any arguments, a public collective returns or raises a documented error, and the job continues.

API_CALLS sets the number of calls (`make fuzz`: 100,000), API_SEED the seed. If API_CALLS is set, the native core is
built with the address and undefined behaviour sanitizers, but not for TensorFlow, which makes fewer and slower calls.
"""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import native_programs

CALLS = int(os.environ.get("API_CALLS", 400))
SEED = int(os.environ.get("API_SEED", 1))
SANITIZED = "API_CALLS" in os.environ
SECONDS = 200 + CALLS // 10
TENSORFLOW_SHARE = 20 if SANITIZED else 1
HERE = Path(__file__).parent


def sanitized_package(folder):
    """The variables for a Python that imports a copy of the package, in `folder`, with a sanitized core."""
    unavailable, module = native_programs.sanitized_module()
    if unavailable:
        pytest.skip(unavailable)
    shutil.copytree(native_programs.ROOT / "bagua_hvd", folder / "bagua_hvd")
    shutil.copy(module, folder / "bagua_hvd")
    libraries = [subprocess.run([native_programs.COMPILER[0], f"-print-file-name={name}"], capture_output=True,
                                text=True, check=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    return {"PYTHONPATH": str(folder), "LD_PRELOAD": " ".join(libraries), "UBSAN_OPTIONS": "print_stacktrace=1",
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}


@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_any_call(run_ranks, tmp_path, framework):
    pytest.importorskip(framework)
    variables = sanitized_package(tmp_path) if SANITIZED and framework == "torch" else {}
    calls = CALLS // (TENSORFLOW_SHARE if framework == "tensorflow" else 1)
    results = run_ranks(2, HERE / f"api_rank_{framework}.py", arguments=[calls, SEED], timeout=SECONDS,
                        env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **variables})
    for rank, result in enumerate(results):
        assert re.search(f"^rank {rank}: {calls} calls", result.output, re.MULTILINE), result.output
        print(result.output)
