"""The base class of algorithms, and the registry of the names under which scripts choose them.

An algorithm determines what is communicated, when, and by which primitive. It sees a model's buckets and a process set,
never a framework's tensor, so it works in every front end. A user's own takes ten lines:

    class Halved(Algorithm):
        "Sends the mean of half the gradients."
        def communicate(self, bucket, group):
            return c_fp_s(bucket, group, prescale_factor=0.5)

    opt = hvd.DistributedOptimizer(opt, algorithm=Halved())

An algorithm may act at these points of a training step:

    backward_begins(model)     the first gradient is ready; until the step, weights are read and must not be written
    communicate(bucket, group) a bucket of gradients is complete; the backward pass may still be running
    before_step(model)         all buckets have been communicated; the optimizer has not read gradients or weights yet
    step(model)                replaces the optimizer's step
    after_step(model)          the weights have been updated

An algorithm must declare the state that it reads there, since access may be costly: TensorFlow copies the weights.
"""
import copy
import difflib
import enum
import functools
from collections.abc import Callable
from typing import Any

from bagua_hvd.codecs import NUMBERS, Codec, float32, topk
from bagua_hvd.core import variables
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import ErrorState, c_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending
from bagua_hvd.tuning.cost import Cost, Ranks

HOOKS = ("backward_begins", "communicate", "before_step", "step", "after_step")


class Safety(enum.IntEnum):
    """How far an algorithm departs from exact training, mildest first; users set a limit (algorithms/auto.py).

    E0: exact mean or sum, up to the order of additions. E1: codecs without memory. E2: codecs with error feedback, a
    frozen variance, low rank. E3: models differ between ranks. E4: ranks also step independently.
    """

    E0 = 0
    E1 = 1
    E2 = 2
    E3 = 3
    E4 = 4


class Algorithm:
    """Keeps the models of a job's ranks together. One instance may serve several optimizers.

    State kept between steps belongs in `model.state` and `bucket.state` (training/state.py), which are in the
    optimizer's checkpoint, and never in the instance. All hooks except `communicate` are called in the same steps on
    all ranks of the group, so they may wait for the operations that they post.

    Attributes:
        safety: see Safety. Default: E4.
        average: whether gradients become the mean over the ranks, or their sum.
        models_differ: whether ranks' models differ between communications; hvd.consensus makes them one.
        asynchronous: whether ranks' weights change at moments that differ between ranks.
        dense_only: whether it cannot serve sparse gradients.
        counts_steps: whether it depends on model.step, which must then be in checkpoints.
        remembers_gradients: whether it keeps state in the gradients' unit, which must follow the loss scale.
        uses_weights: names of the hooks that read weights; before_step and after_step may also write them.
        uses_adam: whether it reads model.adam().
        replaces_step: whether step() may update the weights; if not, it is never called.
        shares_variance: whether Adam's variance is that of full steps (training/variance.py); see full_step().
    Raises:
        TypeError: a subclass declares unknown hooks, or has a step() that would never be called.
    """

    safety: Safety = Safety.E4
    average: bool = True
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
        if cls.overrides("step") and not cls.replaces_step:
            raise TypeError(f"{cls.__name__} has a step(), which would never be called: set replaces_step = True")

    @classmethod
    def overrides(cls, *methods: str) -> list[str]:
        """Those of Algorithm's methods that the class has replaced by its own."""
        return [name for name in methods if getattr(cls, name) is not getattr(Algorithm, name)]

    @property
    def relaxed(self) -> bool:
        """Whether results differ, by design, from the exact mean or sum."""
        return self.safety > Safety.E0

    @property
    def gradients_only(self) -> bool:
        """Whether it only communicates gradients, in every step: then they may be applied one step late."""
        return not (self.overrides("communicates_gradients") or self.uses_weights or self.uses_adam
                    or self.replaces_step or self.models_differ or self.asynchronous)

    @property
    def repeatable(self) -> bool:
        """Whether all communication of a step ends before weights change, so that a failed step can be repeated."""
        return self.gradients_only and not self.overrides("before_step", "after_step")

    @property
    def runs_alone(self) -> bool:
        """Whether it also affects training on a single rank: it replaces the step, or has its own momentum."""
        return self.replaces_step

    def prepare(self, model: Model) -> None:
        """Called when an optimizer adopts it: raises ValueError for an unsupported model, warns of a poor setup."""

    def communicates_gradients(self, model: Model) -> bool:
        """Whether this step communicates gradients; asked once at its beginning, must be equal on all ranks."""
        return True

    def full_step(self, model: Model | None) -> bool:
        """Whether this step applies the mean gradient with nothing withheld; must be equal on all ranks."""
        return False

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        """Starts the communication of a ready bucket; returns its Operation, or any object with wait().

        Called from within the backward pass, in an order that may differ between ranks: it must not block.
        Several operations in sequence are written as an Exchange (exchange.py); what other objects post in wait()
        does not count for the algorithm in hvd.statistics().
        """
        raise NotImplementedError

    def takes(self, dtype: int) -> bool:
        """Whether it can communicate buckets of the native dtype. Others are sent by gradient_allreduce."""
        return True

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost | None:
        """The cost of communicating a bucket after any warm-up; None: unknown, so Auto cannot choose it."""
        return None

    def leave(self, bucket: Bucket, group: ProcessSet) -> Pending:
        """Replaces communicate() in the last step before Auto switches to another algorithm: also sends residuals.

        Default: communicate().
        """
        return self.communicate(bucket, group)

    def bucket_bytes(self, model: Model) -> int | None:
        """The size of gradient buckets in bytes from the next step on; None: BAGUA_DEFAULT_BUCKET_SIZE.

        Asked after each step; must be equal on all ranks. When the size changes, buckets are rebuilt without state.
        Not asked if the user's groups or another setting determine the buckets (model.cut_by_user).
        """
        return None

    def takes_more(self, model: Model) -> bool:
        """Whether weights may be added now: at any time, all ranks must communicate the same number of weights."""
        return not self.asynchronous or model.step == 0

    def agreed(self, model: Model) -> None:
        """Called when the ranks have agreed on step and state: in the first step, after init(), join() and loading."""

    def backward_begins(self, model: Model) -> None:
        """A backward pass has begun; communication of weights that starts here may overlap the rest of it."""

    def before_step(self, model: Model) -> None:
        """Gradients are complete, and the optimizer is about to read them and the weights."""

    def step(self, model: Model) -> bool:
        """Updates the weights instead of the optimizer and returns True; False: the optimizer does it."""
        return False

    def after_step(self, model: Model) -> None:
        """The weights have been updated."""


def communication(algorithm: Algorithm, dtype: int, last: bool = False) -> Callable[[Bucket, ProcessSet], Pending]:
    """The function that communicates buckets of a native dtype: the algorithm's communicate(), or last: its leave().

    For dtypes that the algorithm does not take it is c_fp_s().
    """
    if not algorithm.takes(dtype):
        return functools.partial(c_fp_s, average=algorithm.average)
    return algorithm.leave if last else algorithm.communicate


def checked(name: str, value: float, fits: Callable[[float], bool], expected: str) -> float:
    """Returns a constructor's argument; raises ValueError unless it is a number that fits."""
    if not isinstance(value, NUMBERS) or not fits(value):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return value


def positive(name: str, value: float) -> int:
    """As checked(), for an integer of 1 or more."""

    def counts(value: float) -> bool:
        return not isinstance(value, bool) and 1 <= value < float("inf") and int(value) == value

    return int(checked(name, value, counts, "an integer of 1 or more"))


def not_negative(name: str, value: float) -> int:
    """As checked(), for an integer of 0 or more."""
    return 0 if value == 0 else positive(name, value)


def fraction(name: str, value: float) -> float:
    """As checked(), for a number from 0 to below 1."""
    return checked(name, value, lambda part: 0 <= part < 1, f"0 <= {name} < 1")


def valid_codec(codec: Codec) -> Codec:
    """Returns a constructor's argument `codec`; raises ValueError unless it is a Codec."""
    if not isinstance(codec, Codec):
        raise ValueError(f"codec={codec!r}: expected a codec, such as codecs.sign")
    return codec


def error_state(bucket: Bucket, group: ProcessSet, hierarchical: bool = False, scaled: bool = True,
                name: str = "error", count: int | None = None) -> ErrorState:
    """The bucket's error-feedback state; zeros at first, and after a change of the number of ranks.

    scaled: the encoded values include loss scaling, as gradients do. count: number of elements; None: all.
    """
    shape = bucket.count if count is None else count, group.size(), hierarchical
    return bucket.state.keep(name, lambda: ErrorState(*shape), fits=lambda kept: kept.fits(*shape), scaled=scaled)


def without_loss(bucket: Bucket) -> Codec:
    """A lossless codec for a bucket."""
    return float32 if float32.takes(bucket.dtype) else topk(1.0)        # which takes every dtype


_registry: dict[str, type[Algorithm]] = {}
# Names of earlier versions, and their replacements.
_RETIRED = {
    "acco": 'gradient_allreduce with delay=1', "dion": '"powersgd"', "ef_signsgd": '"doublesqueeze"',
    "lamb": '"gradient_allreduce" with a LAMB of your framework', "local_adam": '"local_sgd"',
    "onebit_lamb": '"onebit_adam"', "onebit_adam_published": "OneBitAdam(published=True)",
    "push_sum": '"decentralized"', "qsgd": 'ByteGrad(codec=codecs.block(stochastic=True))', "terngrad": '"rotated"',
    "zero_one_adam": '"onebit_adam"', "async_decentralized": '"async" or "decentralized"',
    "async_low_precision": '"async"',
    "async_low_precision_decentralized": '"async" or "low_precision_decentralized"',
}


def register(name: str, cls: type[Algorithm]) -> None:
    """Registers an Algorithm class under a name, for `algorithm="name"` and BAGUA_ALGORITHM.

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


def _unknown(name: str) -> ValueError:
    if name in _RETIRED:
        return ValueError(f"the algorithm {name!r} was removed: use {_RETIRED[name]}")
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown algorithm {name!r}.{hint} Known: {', '.join(names())}.")


def get(algorithm: object, **arguments: Any) -> Algorithm:
    """Returns the Algorithm for a registered name, a class or an instance.

    Args:
        algorithm: one of these. None: BAGUA_ALGORITHM from the environment, else gradient_allreduce, or auto with
            HOROVOD_AUTOTUNE=1.
        arguments: for the constructor; not with an instance.
    Raises:
        ValueError: unknown name; the message lists the known ones. TypeError: another type, or an instance with
            arguments.
    """
    if algorithm is None:
        algorithm = variables.read("BAGUA_ALGORITHM")
        if algorithm == "gradient_allreduce" and variables.read("HOROVOD_AUTOTUNE"):
            algorithm = "auto"
    if isinstance(algorithm, Algorithm):
        if arguments:
            name = type(algorithm).__name__
            raise TypeError(f"this {name} is an instance, so it takes no {', '.join(arguments)}: pass its class or "
                            f"name, or {name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
        return algorithm
    if isinstance(algorithm, str):
        if algorithm not in _registry:
            raise _unknown(algorithm)
        algorithm = _registry[algorithm]
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm(**arguments)
    raise TypeError(f"algorithm={algorithm!r}: expected a name ({', '.join(names())}), an Algorithm or its class")


def choose(algorithm: str | Algorithm | type[Algorithm] | None, average: bool) -> Algorithm:
    """Returns the Algorithm for a front end's `algorithm=` and `op=`.

    Args:
        algorithm: as for get().
        average: True for op=Average, False for op=Sum.
    Raises:
        ValueError: unknown name; an algorithm that was made for the other op, or has no sum.
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
            f"average={chosen.average}: make the two agree"
        )
    if getattr(chosen, "hierarchical", False) and not variables.read("BAGUA_HIERARCHY"):
        flat: Any = copy.copy(chosen)       # the user's instance may serve other optimizers
        flat.hierarchical = False
        return flat  # type: ignore[no-any-return]
    return chosen
