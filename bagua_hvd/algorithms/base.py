"""What an algorithm is, and the names under which scripts choose one.

An algorithm says what is communicated, when and by which primitive. It sees buckets and process sets, never a
framework's tensor, so every front end has it on the day it is written. A user's own takes ten lines:

    class Halved(Algorithm):
        "Sends the mean of half the gradients."
        def communicate(self, bucket, group):
            return c_fp_s(bucket, group, prescale_factor=0.5)

    opt = hvd.DistributedOptimizer(opt, algorithm=Halved())
"""
import difflib
import os

DEFAULT = "gradient_allreduce"


class Gradient:
    """What is communicated: gradients, each bucket as it fills, overlapping the backward pass."""


class Algorithm:
    """How the ranks of a job keep their models together. One instance may serve several optimizers.

    What must be kept from step to step lies in `bucket.state`, not in the instance. The hooks after `communicate` do
    nothing by default, and are called alike on all ranks of the group.

    Attributes:
        communicates: Gradient.
        average: whether what is communicated becomes the mean over the ranks, or their sum.
        relaxed: whether results differ, by design, from the exact mean or sum.
    """

    communicates = Gradient
    average = True
    relaxed = True

    def communicate(self, bucket, group):
        """Begins the communication of a bucket that is ready; returns its Operation (or whatever has wait()).

        Called from within the backward pass, in an order that may differ between ranks: it must not block.
        """
        raise NotImplementedError

    def takes(self, dtype):
        """Whether it can communicate buckets of the native dtype. Others go by gradient_allreduce."""
        return True

    def before_forward(self, buckets, group):
        """Before a forward pass in training. For front ends that see it; an optimizer alone does not."""

    def after_backward(self, buckets, group):
        """When all buckets have been communicated, before the optimizer reads the gradients."""

    def after_step(self, buckets, group):
        """After the optimizer has changed the weights."""

    def state_dict(self, buckets):
        """What a checkpoint of this rank must hold, made of dicts, lists, numbers and bytes; empty: nothing.

        Name buckets by their place in `buckets`: the names are of this process only.
        """
        return {}

    def load_state_dict(self, state, buckets, group):
        """Takes up a state_dict() of the same rank."""


_registry = {}


def register(name, cls):
    """Makes an Algorithm class known under a name, for `algorithm="name"` and BAGUA_ALGORITHM.

    Raises:
        ValueError: another class has the name. TypeError: not an Algorithm class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"register({name!r}, ...) takes a subclass of Algorithm, not {cls!r}")
    if _registry.setdefault(name, cls) is not cls:
        raise ValueError(f"the algorithm name {name!r} is taken by {_registry[name].__name__}")


def names():
    """The registered names, sorted."""
    return sorted(_registry)


def get(algorithm, **arguments):
    """The Algorithm meant by a registered name, a class or an instance.

    Args:
        arguments: for the constructor; not with an instance.
    Raises:
        ValueError: unknown name; the sentence lists the known ones. TypeError: something else.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str):
        if algorithm not in _registry:
            close = difflib.get_close_matches(algorithm, names(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown algorithm {algorithm!r}.{hint} Known: {', '.join(names())}.")
        algorithm = _registry[algorithm]
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm(**arguments)
    raise TypeError(f"algorithm={algorithm!r}: expected a name ({', '.join(names())}), an Algorithm or its class")


def choose(algorithm, average):
    """What a front end's `algorithm=` and `op=` mean together.

    Args:
        algorithm: as for get(); None: BAGUA_ALGORITHM from the environment, else gradient_allreduce.
        average: True for op=Average, False for op=Sum.
    Raises:
        ValueError: unknown name; an instance that was made for the other op; an algorithm that communicates something
            else than gradients, which this version's optimizers cannot serve.
    """
    if algorithm is None:
        algorithm = os.environ.get("BAGUA_ALGORITHM", "").strip() or DEFAULT
    chosen = get(algorithm) if average or isinstance(algorithm, Algorithm) else get(algorithm, average=False)
    if chosen.average != average:
        raise ValueError(
            f"op={'Average' if average else 'Sum'}, but {type(chosen).__name__} was made with "
            f"average={chosen.average}: say the same in both"
        )
    if chosen.communicates is not Gradient:
        raise ValueError(
            f"{type(chosen).__name__} communicates {getattr(chosen.communicates, '__name__', chosen.communicates)}: "
            "this version's optimizers communicate gradients, and take algorithms that do"
        )
    return chosen
