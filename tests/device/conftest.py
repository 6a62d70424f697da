import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            if not (shutil.which("gcc") or shutil.which("cc")):
                item.add_marker(pytest.mark.skip(reason="no C compiler for the stand-in of a GPU"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(func_only=True))


@pytest.fixture(scope="session", autouse=True)
def built():
    """Before a time limit runs: compiling the kernels takes half a minute, and longer on a busy machine."""
    import device_arrays  # needs torch
    import nvrtc

    device_arrays.fake_cuda_path()
    if nvrtc.library() and device_arrays.missing_gpu():
        device_arrays.emulation()
