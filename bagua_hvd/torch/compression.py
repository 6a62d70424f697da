"""Compression of gradients. float16 uses the framework's own cast."""
from typing import Any

import torch

from bagua_hvd.collectives.compression import Compressor, NoneCompressor
from bagua_hvd.torch.frontend import check_memory


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, others unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point:
            check_memory(tensor)
            return tensor.type(torch.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The built-in compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
