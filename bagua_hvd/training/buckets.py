"""Buckets: tensors that are communicated together, as one flat array.

A bucket never copies: it is an ordered list of views, from which the core packs and to which it writes back. All its
members have the same dtype and device.
"""
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from bagua_hvd.core import native, variables, vectors
from bagua_hvd.core.native import TensorView
from bagua_hvd.training.state import State

# The first bucket to fill is small, so that communication starts soon after the backward pass does.
FIRST_BUCKET_SIZE = 1 * variables.MIB


class Member(NamedTuple):
    """One tensor of a bucket. device: any value that separates tensors into buckets; only compared."""

    name: str
    shape: tuple[int, ...]
    dtype: int
    device: object = "cpu"

    @property
    def count(self) -> int:  # type: ignore[override]
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * native.dtype_size(self.dtype)


class Bucket:
    """Some members of a model: their gradients, and in each step views of them.

    Args:
        name: ranks match buckets by it: unique within the process set, the same on all ranks.
        members: dict of reducer index -> Member, in the order of the layout; one dtype and device.
        prescale_factor, postscale_factor: the optimizer's factors before and after the reduction.
        model: its Model (training/model.py); None: a standalone bucket.
    Attributes:
        views: TensorViews in place (src == dst), in the order of the layout; complete while an algorithm communicates.
        missing: members without a view in this step.
        dtype: the native dtype to communicate. count: number of elements, N in the formulas. nbytes: bytes to
            communicate, before an algorithm encodes them. All are those of the views (compression may have changed
            them), else of the members.
        state: a State that an algorithm keeps with this bucket between steps (error feedback, replicas, ...).
    """

    def __init__(self, name: str, members: dict[int, Member], prescale_factor: float = 1.0,
                 postscale_factor: float = 1.0, model: Any = None) -> None:
        if len({(member.dtype, member.device) for member in members.values()}) > 1:
            raise ValueError(f"bucket {name!r}: its members differ in dtype or device")
        first = next(iter(members.values()))
        self.name = name
        self.members = members
        self.prescale_factor = prescale_factor
        self.postscale_factor = postscale_factor
        self.model = model
        self.state = State(name)
        self._workspaces: dict[Any, np.ndarray] = {}
        # dtype, count and nbytes of the members
        self._of_members = (first.dtype, sum(member.count for member in members.values()),
                            sum(member.nbytes for member in members.values()))
        self.clear()

    def clear(self) -> None:
        """Drops the views, for a new step."""
        self._views: dict[int, TensorView | None] = dict.fromkeys(self.members)
        self.missing = len(self._views)
        self.dtype, self.count, self.nbytes = self._of_members

    def place(self, index: int, view: TensorView) -> None:
        """Sets the tensor of member `index` in this step."""
        self._views[index] = view
        self.missing -= 1
        member = self.members[index]
        if view.shape != member.shape or view.dtype != member.dtype:    # compressed
            count, self.dtype = math.prod(view.shape), view.dtype
            self.count += count - member.count
            self.nbytes += count * native.dtype_size(view.dtype) - member.nbytes

    def remove(self, index: int) -> None:
        """Removes a member permanently; it must not have been placed in this step."""
        member = self.members.pop(index)
        dtype, count, nbytes = self._of_members
        self._of_members = dtype, count - member.count, nbytes - member.nbytes
        self.count -= member.count
        self.nbytes -= member.nbytes
        del self._views[index]
        self.missing -= 1

    @property
    def views(self) -> list[TensorView]:
        return list(self._views.values())       # type: ignore[arg-type]  # complete

    @property
    def step(self) -> int:
        """The model's step; 0 for a standalone bucket."""
        return int(self.model.step) if self.model else 0

    def seed(self, number: int) -> int:
        """A seed for codecs that round at random: differs by number (below 2^32), members, and window of a step.

        It does not depend on the bucket's name, which counts optimizers, so that a resumed or repeated training draws
        the same numbers.
        """
        window = self.model.window if self.model else 0
        members = ",".join([*(member.name for member in self.members.values()), *map(str, [window] * bool(window))])
        return crc32(members.encode()) << 32 | number % (1 << 32)

    def flat(self, views: Sequence[TensorView], tail: int = 0, workspace: str | None = None) -> np.ndarray:
        """A copy of tensors shaped as the members: a flat array of flat_dtype.

        Args:
            tail: elements to append, uninitialized.
            workspace: None: a new array; a name: the array of workspace().
        """
        count = self.count + tail
        values = self.workspace(workspace, count, self.flat_dtype) if workspace else np.empty(count, self.flat_dtype)
        vectors.pack(views, values[:self.count])
        return values

    def workspace(self, name: str, count: int, dtype: Any) -> np.ndarray:
        """An uninitialized array, kept for later calls. New memory costs more than a pass over it."""
        array = self._workspaces.get(name)
        if array is None or array.size != count or array.dtype != dtype:
            array = self._workspaces[name] = np.empty(count, dtype)
        return array

    def slices(self) -> list[slice]:
        """The slice of each member in a flat array."""
        ends = list(itertools.accumulate(member.count for member in self.members.values()))
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def read(self, tail: int = 0, workspace: str | None = None) -> np.ndarray:
        """A flat copy of this step's views; see flat()."""
        return self.flat(self.views, tail, workspace)

    def write(self, values: np.ndarray) -> None:
        """Sets this step's views from a flat array, rounded to their dtype."""
        vectors.unpack(self.views, values)

    def add(self, values: np.ndarray) -> None:
        """Adds a flat array to this step's views: read() + values, rounded to their dtype; one pass over memory."""
        vectors.unpack_add(self.views, values.astype(self.flat_dtype, copy=False))

    @property
    def gradients(self) -> list[TensorView]:
        """Read-only views of the members' current gradients; zeros for missing ones."""
        return [self.model.source.gradient(index) for index in self.members]

    @property
    def weights(self) -> list[TensorView]:
        """Views of the members' current weights. Call model.source.weight_written(index) after writing.

        Raises:
            ValueError: the algorithm has not declared that it reads weights in the current hook.
        """
        self.model.check_weight_access()
        return [self.model.source.weight(index) for index in self.members]

    @property
    def flat_dtype(self) -> type[np.floating[Any]]:
        """The NumPy dtype of flat copies: float64 for float64, else float32."""
        return np.float64 if self.dtype == native.FLOAT64 else np.float32

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {[member.name for member in self.members.values()]})"


class Weights(Bucket):
    """The weights of some members of a Model: views of their current memory."""

    @property
    def views(self) -> list[TensorView]:
        return self.weights

    def write(self, values: np.ndarray) -> None:
        super().write(values)
        self.written()

    def add(self, values: np.ndarray) -> None:
        super().add(values)
        self.written()

    def written(self) -> None:
        """Call it after the core has written the weights."""
        for index in self.members:
            self.model.source.weight_written(index)


def partition(members: dict[int, Member], limit: int | None = None) -> list[list[int]]:
    """Cuts members into buckets.

    Backward passes yield gradients roughly from the last parameter to the first, so the layout is reversed, too. Each
    dtype and device has its own running bucket, so a few float32 norms between bfloat16 weights do not split the
    weights into small buckets. A member that would exceed the limit begins a new bucket, and may exceed it alone.

    Args:
        members: dict of index -> Member, in parameter order.
        limit: bytes in a bucket, at most FIRST_BUCKET_SIZE in the first one; None: BAGUA_DEFAULT_BUCKET_SIZE. With
            BAGUA_FUSION=0 each member has its own.
    Returns:
        A list of lists of indices, in the order in which the buckets are expected to fill.
    """
    limit = variables.read("BAGUA_DEFAULT_BUCKET_SIZE") if limit is None else limit
    if not variables.read("BAGUA_FUSION"):
        limit = 0       # no two members share a bucket
    buckets: list[list[int]] = []
    running: dict[tuple[int, object], list[Any]] = {}       # (dtype, device) -> [indices, bytes, limit]
    for index in reversed(members):
        member = members[index]
        kind = (member.dtype, member.device)
        entry = running.get(kind)
        if entry is None or entry[1] + member.nbytes > entry[2]:
            entry = running[kind] = [[], 0, limit if buckets else min(FIRST_BUCKET_SIZE, limit)]
            buckets.append(entry[0])
        entry[0].append(index)
        entry[1] += member.nbytes
    return buckets


def partition_groups(members: dict[int, Member], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cuts members into the buckets that the user asked for: one for each group, dtype and device, of any size.

    Args:
        members: as for partition(). groups: lists of indices; members in no group are cut by partition().
    """
    buckets: list[list[int]] = []
    rest = dict(members)
    for group in groups:
        by_kind: dict[tuple[int, object], list[int]] = {}
        for index in group:
            member = rest.pop(index)
            by_kind.setdefault((member.dtype, member.device), []).append(index)
        buckets.extend(by_kind.values())
    return buckets + partition(rest)
