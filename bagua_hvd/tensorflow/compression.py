"""What a gradient is turned into before it travels, under Horovod's names. Codecs of the core are not here."""
import tensorflow as tf


class Compressor:
    """Interface of a compression: a class with two static methods."""

    @staticmethod
    def compress(tensor):
        """Returns the tensor to communicate, and a context that decompress() needs."""

    @staticmethod
    def decompress(tensor, ctx):
        """Returns the tensor in its original form."""


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class FP16Compressor(Compressor):
    """Sends floating tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor):
        if tensor.dtype.is_floating:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression:
    """The built-in compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor
