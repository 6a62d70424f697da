"""The front end's handling of GPU tensors. PyTorch here may lack CUDA, so objects pose as its tensors, and the fake
driver (tests/device/fake_cuda.c) as the GPU: only the front end's own decisions are tested.
"""
from types import SimpleNamespace

import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.core import device
from bagua_hvd.torch import frontend as frontend_module
from bagua_hvd.torch.frontend import TorchFrontend
from device_arrays import fake_cuda_path, fake_device


class Posing:
    """A contiguous float32 tensor on `device`, at address 4096."""

    dtype, layout, is_cpu, shape = torch.float32, torch.strided, False, torch.Size([2, 3])

    def __init__(self, device="cuda:0", address=4096):
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.address, self.recorded = address, []

    def data_ptr(self):
        return self.address

    def is_contiguous(self):
        return True

    def is_neg(self):
        return False

    def type(self):
        return f"torch.{self.device.type}.FloatTensor"

    def record_stream(self, stream):
        self.recorded.append(stream.address)


@pytest.fixture
def frontend(monkeypatch):
    monkeypatch.setattr(frontend_module, "device", lambda index: fake_device())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: SimpleNamespace(address=address))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77 + device.index))
    return TorchFrontend()


def test_a_view_knows_its_gpu_and_the_allocator_its_streams(frontend):
    tensor, output = Posing(), Posing(address=8192)
    view = frontend.view(tensor, output)
    assert (view.src, view.dst, view.shape) == (4096, 8192, (2, 3))
    assert view.placement.device is fake_device()
    assert view.placement.stream() == 77
    streams = [fake_device().to_host, fake_device().from_host]
    assert tensor.recorded == streams and output.recorded == streams
    in_place = frontend.view(tensor, tensor)
    assert in_place.src == in_place.dst == 4096
    assert in_place.placement is view.placement
    assert tensor.recorded == 2 * streams
    assert frontend.view(tensor).dst == 0


def test_what_is_refused(frontend):
    with pytest.raises(ValueError, match="bagua_hvd serves tensors of the CPU and of CUDA, and this one is on xpu:0"):
        frontend.view(Posing("xpu:0"))
    with pytest.raises(ValueError, match="the tensor is on cuda:0, but its output on cuda:1"):
        frontend.view(Posing(), Posing("cuda:1"))


def test_what_the_build_says(monkeypatch):
    assert hvd.cuda_built() is True
    monkeypatch.setattr(device, "nccl_files", fake_cuda_path)
    assert hvd.nccl_built() == 22105
    monkeypatch.setenv("BAGUA_HVD_NCCL", "0")
    assert hvd.nccl_built() == 0
