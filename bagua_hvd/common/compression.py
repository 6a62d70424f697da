"""What a gradient is turned into before it travels, under Horovod's names. Codecs of the core are not here."""


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
