"""Compressions of gradients: float16 is made by the framework's own cast."""
import torch

from bagua_hvd.common.compression import Compressor, NoneCompressor


class FP16Compressor(Compressor):
    """Sends floating tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.type(torch.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The built-in compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor
