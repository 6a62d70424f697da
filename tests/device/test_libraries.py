"""The vendor's libraries, opened at run time: versions of those found, names of those missing; none is required."""
import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_hvd.core import device
from bagua_hvd.core.exceptions import HorovodInternalError
from device_arrays import ROOT, fake_cuda, fake_cuda_path, missing_gpu
from tests.laboratory import device as laboratory

NCCL = next((path for path in device.nccl_files().split(":") if path), None)


@pytest.mark.skipif(NCCL is None, reason="the package nvidia-nccl-cu12 (or -cu13) is not installed")
def test_nccl_of_the_package():
    """It reports its version, and creates the id of a communicator, which needs no GPU."""
    library, version, unique_id = ctypes.CDLL(NCCL), ctypes.c_int(), ctypes.create_string_buffer(128)
    assert library.ncclGetVersion(ctypes.byref(version)) == 0
    assert device.nccl_facts() == (version.value, "")
    assert library.ncclGetUniqueId(unique_id) == 0
    assert any(unique_id.raw)


@pytest.mark.skipif(NCCL is None, reason="the package nvidia-nccl-cu12 (or -cu13) is not installed")
def test_our_numbers_are_those_of_nccls_header():
    """native/device/nccl_library.h has its own prototypes: types, reductions, states, and the head of ncclConfig_t."""
    ours = (ROOT / "native" / "device" / "nccl_library.h").read_text()
    theirs = (Path(NCCL).parents[1] / "include" / "nccl.h").read_text()
    for name in ("Int8", "Uint8", "Int32", "Int64", "Float16", "Float32", "Float64", "Bfloat16", "Sum", "Prod", "Max",
                 "Min", "Success"):
        expected = re.search(rf"\bnccl{name} *= *(\d+)", theirs)[1]
        assert re.search(rf"\bNCCL_{name.upper()} = (\d+)", ours)[1] == expected, name
    assert re.search(r"ncclInProgress *= *(\d+)", theirs)[1] == re.search(r"NCCL_IN_PROGRESS = (\d+)", ours)[1]
    assert re.search(r"NCCL_UNIQUE_ID_BYTES (\d+)", theirs)[1] == re.search(r"NCCL_UNIQUE_ID_BYTES = (\d+)", ours)[1]
    assert re.search(r"ncclConfig_v\d+ \{.*?size_t size;.*?magic;.*?version;.*?int blocking;", theirs, re.DOTALL)
    for symbol, parameters in re.findall(r'X\("(nccl\w+)", \w+, [\w *]+,\s*\\?\s*\((.*?)\)\)', ours, re.DOTALL):
        declared = re.search(rf"\b{symbol}\((.*?)\);", theirs, re.DOTALL)[1]
        count = 0 if parameters == "void" else parameters.count(",") + 1
        assert count == (declared.count(",") + 1 if declared.strip() else 0), symbol


def test_nccl_that_is_missing(monkeypatch):
    monkeypatch.setattr(device, "nccl_files", lambda: "/nowhere/libnccl.so.2")
    version, reason = device.nccl_facts()
    if version == 0:        # otherwise the system or this process has one
        assert "libnccl.so.2 cannot be loaded: /nowhere/libnccl.so.2" in reason
        assert "install the package nvidia-nccl-cu12 (or -cu13), or name the file in BAGUA_HVD_LIBNCCL" in reason


def test_a_file_that_is_no_driver(monkeypatch):
    """It has the right name, but not the functions."""
    libc = next(line.split()[-1] for line in open("/proc/self/maps") if "/libc.so" in line or "/libc-" in line)
    monkeypatch.setenv("BAGUA_HVD_LIBCUDA", libc)
    with pytest.raises(HorovodInternalError, match="libcuda.so.1 has no function cuInit: it is too old; it comes with"):
        device.Device(0)


def test_the_driver_is_named_by_a_variable(monkeypatch):
    monkeypatch.setenv("BAGUA_HVD_LIBCUDA", f"/nowhere/libcuda.so.1:{fake_cuda_path()}")
    monkeypatch.setenv("BHVD_FAKE_CUDA_VERSION", "12040")
    with fake_cuda().devices(3):
        assert device.cuda_facts() == (12040, 3, "")


def test_importing_opens_nothing():
    code = """
import torch                    # which may open its own
def opened():
    return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line or "libnccl" in line}
before = opened()
import bagua_hvd.torch
print(opened() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(not missing_gpu(), reason="there is a GPU, and the laboratory measures it")
def test_the_laboratory_says_what_is_missing():
    with pytest.raises(SystemExit, match="nothing can be measured here: "):
        laboratory.main([])
