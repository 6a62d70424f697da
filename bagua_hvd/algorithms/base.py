"""What an algorithm is, and the names under which scripts choose one.

An algorithm says what is communicated, when and by which primitive. It sees a model's buckets and a process set, never
a framework's tensor, so every front end has it on the day it is written. A user's own takes ten lines:

    class Halved(Algorithm):
        "Sends the mean of half the gradients."
        def communicate(self, bucket, group):
            return c_fp_s(bucket, group, prescale_factor=0.5)

    opt = hvd.DistributedOptimizer(opt, algorithm=Halved())

One step of training, and where an algorithm may act:

    backward_begins(model)     the first gradient is there; weights are read until the step and must not be written
    communicate(bucket, group) a bucket of gradients is complete; while the backward pass goes on
    before_step(model)         all buckets have been communicated; the optimizer has not read gradients or weights yet
    step(model)                instead of the optimizer
    after_step(model)          the weights are new

What it looks at there it declares, for to show it may cost something: in TensorFlow weights are copied.
"""
import copy
import difflib
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from bagua_hvd.codecs import Codec, float32, topk
from bagua_hvd.core import variables
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import ErrorState
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending
from bagua_hvd.tuning.cost import Cost, Ranks

HOOKS = ("backward_begins", "communicate", "before_step", "step", "after_step")


class Safety(enum.IntEnum):
    """What an algorithm does to a training, the mildest first; by this users allow (algorithms/auto.py).

    E0: nothing: the exact mean or sum, but for the order of additions. E1: codes without memory. E2: codes whose errors
    are kept, a frozen variance, low rank. E3: models differ between ranks. E4: and ranks step when they like.
    """

    E0 = 0
    E1 = 1
    E2 = 2
    E3 = 3
    E4 = 4


class Algorithm:
    """How the ranks of a job keep their models together. One instance may serve several optimizers.

    What must be kept from step to step lies in `model.state` and `bucket.state` (training/state.py), never in the
    instance: so it is in the optimizer's checkpoint. All hooks but `communicate` are called alike on all ranks of the
    group, in the same steps: what they post, they may wait for.

    Attributes:
        safety: what it does to a training. A class that does not say is taken for the wildest.
        average: whether gradients become the mean over the ranks, or their sum.
        relaxed: whether results differ, by design, from the exact mean or sum.
        models_differ: whether ranks' models differ between communications; hvd.consensus makes them one.
        asynchronous: whether ranks' weights change at moments that differ between ranks.
        dense_only: whether it cannot serve sparse gradients.
        counts_steps: whether what it does depends on model.step, which then belongs into a checkpoint.
        remembers_gradients: whether it keeps anything in the gradients' unit, which has to know of loss scaling.
        uses_weights: the hooks, by name, that look at weights; what before_step and after_step write there counts.
        uses_adam: whether it looks at model.adam().
        replaces_step: whether step() may update the weights. Else it is never called.
        shares_variance: whether an Adam's variance is to be that of full steps (training/variance.py); see full_step().
    Raises:
        TypeError: where a class declares hooks that there are not, or has a step() that would never be called.
    """

    safety: Safety = Safety.E4
    average: bool = True
    relaxed: bool = True
    models_differ: bool = False
    asynchronous: bool = False
    dense_only: bool = False
    counts_steps: bool = False
    remembers_gradients: bool = False
    uses_weights: tuple[str, ...] = ()
    uses_adam: bool = False
    replaces_step: bool = False
    shares_variance: bool = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not isinstance(cls.uses_weights, tuple) or not set(cls.uses_weights) <= set(HOOKS):
            raise TypeError(f"{cls.__name__}.uses_weights = {cls.uses_weights!r}: expected a tuple of some of {HOOKS}")
        if cls.step is not Algorithm.step and not cls.replaces_step:
            raise TypeError(f"{cls.__name__} has a step(), which would never be called: set replaces_step = True")

    @property
    def gradients_only(self) -> bool:
        """Whether it communicates gradients in every step, and does nothing else: then they may be a step late."""
        return type(self).gradients_travel is Algorithm.gradients_travel and not (
            self.uses_weights or self.uses_adam or self.replaces_step or self.models_differ or self.asynchronous)

    @property
    def repeatable(self) -> bool:
        """Whether all that a step communicates ends before it changes weights: one that fails has changed nothing."""
        hooks = ("before_step", "after_step")
        return self.gradients_only and all(getattr(type(self), hook) is getattr(Algorithm, hook) for hook in hooks)

    @property
    def runs_alone(self) -> bool:
        """Whether it changes the training of a single rank, too: it replaces the step, or has a momentum of its own."""
        return self.replaces_step

    def prepare(self, model: Model) -> None:
        """When an optimizer takes it up: raises ValueError for what it cannot serve, warns of what is unwise."""

    def gradients_travel(self, model: Model) -> bool:
        """Whether this step communicates gradients; asked once at its beginning, the same answer on all ranks."""
        return True

    def full_step(self, model: Model | None) -> bool:
        """Whether gradients of this step become their mean over the ranks, nothing withheld; the same on all ranks."""
        return False

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        """Begins the communication of a bucket that is ready; returns its Operation, or whatever has wait().

        Called from within the backward pass, in an order that may differ between ranks: it must not block.
        What takes several operations is written as an Exchange (exchange.py).
        """
        raise NotImplementedError

    def takes(self, dtype: int) -> bool:
        """Whether it can communicate buckets of the native dtype. Others go by gradient_allreduce."""
        return True

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost | None:
        """What communicating a bucket takes, after any warm-up; None: nobody knows, and Auto cannot choose it."""
        return None

    def leave(self, bucket: Bucket, group: ProcessSet) -> Pending:
        """As communicate(), for the last time before another algorithm: what is kept of gradients is sent as well."""
        return self.communicate(bucket, group)

    def bucket_bytes(self, model: Model) -> int | None:
        """How many bytes of gradients are to travel together from the next step on; None: BAGUA_DEFAULT_BUCKET_SIZE.

        Asked after each step; the same answer on all ranks. Buckets are cut anew when it is another, and begin without
        state. Not asked where something else says what travels together (model.cut_by_user).
        """
        return None

    def takes_more(self, model: Model) -> bool:
        """Whether weights may be added to the model now: all ranks must communicate as many of them at a time."""
        return not self.asynchronous or model.step == 0

    def agreed(self, model: Model) -> None:
        """The ranks have agreed on the step and on what they keep: in the first step, after init(), join(), loading."""

    def backward_begins(self, model: Model) -> None:
        """A backward pass has begun; what it communicates of the weights may overlap the rest of it."""

    def before_step(self, model: Model) -> None:
        """Gradients are complete, and the optimizer is about to read them and the weights."""

    def step(self, model: Model) -> bool:
        """Updates the weights in the optimizer's place and returns True; False: the optimizer does it."""
        return False

    def after_step(self, model: Model) -> None:
        """The weights have been updated."""


def checked(name: str, value: float, fits: Callable[[float], bool], expected: str) -> float:
    """The value of a constructor's argument; ValueError: it is not a number, or not one that fits."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or not fits(value):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return value


def positive(name: str, value: float) -> int:
    """The same, of one that counts something, 1 or more."""

    def counts(value: float) -> bool:
        return not isinstance(value, bool) and 1 <= value < float("inf") and int(value) == value

    return int(checked(name, value, counts, "an integer of 1 or more"))


def not_negative(name: str, value: float) -> int:
    """The same, 0 or more."""
    return 0 if value == 0 else positive(name, value)


def fraction(name: str, value: float) -> float:
    """The same, 0 or more and below 1."""
    return checked(name, value, lambda part: 0 <= part < 1, f"0 <= {name} < 1")


def valid_codec(codec: Codec) -> Codec:
    """The value of a constructor's argument `codec`; ValueError: it is not a codec."""
    if not isinstance(codec, Codec):
        raise ValueError(f"codec={codec!r}: expected a codec, such as codecs.sign")
    return codec


def blocks(count: int, size: int = 1 << 16) -> list[slice]:
    """Slices that cover `count` elements: arithmetic on one at a time stays in the cache."""
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def error_state(bucket: Bucket, group: ProcessSet, hierarchical: bool = False, scaled: bool = True,
                name: str = "error", count: int | None = None) -> ErrorState:
    """The bucket's memory of error feedback; zeros at first, and when the number of ranks has changed.

    scaled: what is encoded is the gradient as it is, loss scaling included. count: of the elements; None: all.
    """
    shape = bucket.count if count is None else count, group.size(), hierarchical
    state: ErrorState = bucket.state.keep(name, lambda: ErrorState(*shape), fits=lambda kept: kept.fits(*shape),
                                          scaled=scaled)
    return state


def without_loss(bucket: Bucket) -> Codec:
    """A codec that loses nothing of a bucket."""
    return float32 if float32.takes(bucket.dtype) else topk(1.0)        # which takes every dtype


_registry: dict[str, type[Algorithm]] = {}
# What a first page shows, the mildest first.
_MENU = ("auto", "gradient_allreduce", "bytegrad", "rotated", "powersgd", "onebit_adam", "diloco", "async")
# Names of earlier versions, and what has taken their place.
_RETIRED = {
    "acco": 'gradient_allreduce with delay=1', "dion": '"powersgd"', "ef_signsgd": '"doublesqueeze"',
    "lamb": '"gradient_allreduce" with a LAMB of your framework', "local_adam": '"local_sgd"',
    "onebit_lamb": '"onebit_adam"', "onebit_adam_published": "OneBitAdam(published=True)",
    "push_sum": '"decentralized"', "qsgd": "ByteGrad(codec=codecs.qsgd())", "terngrad": '"rotated"',
    "zero_one_adam": '"onebit_adam"', "async_decentralized": 'Async("shift_one")',
    "async_low_precision": "Async(codec=codecs.minmax_uint8)",
    "async_low_precision_decentralized": 'Async("ring", codec=codecs.minmax_uint8)',
}


def register(name: str, cls: type[Algorithm]) -> None:
    """Makes an Algorithm class known under a name, for `algorithm="name"` and BAGUA_ALGORITHM.

    Raises:
        ValueError: another class has the name. TypeError: not an Algorithm class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"register({name!r}, ...) takes a subclass of Algorithm, not {cls!r}")
    if _registry.setdefault(name, cls) is not cls:
        raise ValueError(f"the algorithm name {name!r} is taken by {_registry[name].__name__}")


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_registry)


def menu() -> list[str]:
    """The names to choose from first, the mildest first."""
    return [name for name in _MENU if name in _registry]


def _unknown(name: str) -> ValueError:
    if name in _RETIRED:
        return ValueError(f"the algorithm {name!r} is gone: use {_RETIRED[name]}")
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown algorithm {name!r}.{hint} Known: {', '.join(names())}.")


def get(algorithm: object, **arguments: Any) -> Algorithm:
    """The Algorithm meant by a registered name, a class or an instance.

    Args:
        algorithm: one of these; None: BAGUA_ALGORITHM from the environment, else gradient_allreduce, with
            HOROVOD_AUTOTUNE=1 auto.
        arguments: for the constructor; not with an instance.
    Raises:
        ValueError: unknown name; the sentence lists the known ones. TypeError: something else, or an instance with
            arguments.
    """
    if algorithm is None:
        algorithm = variables.read("BAGUA_ALGORITHM")
        if algorithm == "gradient_allreduce" and variables.read("HOROVOD_AUTOTUNE"):
            algorithm = "auto"
    if isinstance(algorithm, Algorithm):
        if arguments:
            name = type(algorithm).__name__
            raise TypeError(f"{name} is made already, so it takes no {', '.join(arguments)}: give its class or name, "
                            f"or {name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
        return algorithm
    if isinstance(algorithm, str):
        if algorithm not in _registry:
            raise _unknown(algorithm)
        algorithm = _registry[algorithm]
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm(**arguments)
    raise TypeError(f"algorithm={algorithm!r}: expected a name ({', '.join(names())}), an Algorithm or its class")


def choose(algorithm: str | Algorithm | type[Algorithm] | None, average: bool) -> Algorithm:
    """What a front end's `algorithm=` and `op=` mean together.

    Args:
        algorithm: as for get().
        average: True for op=Average, False for op=Sum.
    Raises:
        ValueError: unknown name; an algorithm that was made for the other op, or knows no sums.
    """
    chosen = get(algorithm)
    if not average and chosen.average and not isinstance(algorithm, Algorithm):
        try:
            chosen = get(algorithm, average=False)
        except TypeError:
            raise ValueError(f"op=Sum: {type(chosen).__name__} takes the mean over the ranks, not the sum") from None
    if chosen.average != average:
        raise ValueError(
            f"op={'Average' if average else 'Sum'}, but {type(chosen).__name__} was made with "
            f"average={chosen.average}: say the same in both"
        )
    if getattr(chosen, "hierarchical", False) and not variables.read("BAGUA_HIERARCHY"):
        flat: Any = copy.copy(chosen)       # the user's own may serve other optimizers, made before
        flat.hierarchical = False
        return flat  # type: ignore[no-any-return]
    return chosen
