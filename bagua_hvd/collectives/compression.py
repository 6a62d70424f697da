"""Compression of gradients before communication, under Horovod's names. The core's codecs are in codecs.py."""
from typing import Any


class Compressor:
    """Interface of a compression: a class with two static methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to communicate, and a context that decompress() needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor in its original form."""
        raise NotImplementedError


def is_compression(value: Any) -> bool:
    """Whether it has the methods of a Compressor; a user's class need not derive from it."""
    return hasattr(value, "compress") and hasattr(value, "decompress")


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor
