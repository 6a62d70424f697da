"""Which gradient is in which bucket: in the order of readiness, by the user's groups, or in none."""
from collections.abc import Iterable, Sequence

from bagua_hvd.training.buckets import Bucket, Member, partition, partition_groups
from bagua_hvd.training.model import Model


class Layout:
    """The assignment of a model's gradients to buckets.

    Args:
        model: its `gradients` are the buckets. prescale_factor, postscale_factor: see Bucket.
    Attributes:
        name: prefix of the buckets' names, before their index. members: by index.
        bucket_of: by index; None: the gradient is communicated by itself.
        limit: bytes in a bucket; None: BAGUA_DEFAULT_BUCKET_SIZE.
    """

    def __init__(self, model: Model, prescale_factor: float, postscale_factor: float) -> None:
        self.name = ""
        self.members: list[Member] = []
        self.bucket_of: list[Bucket | None] = []
        self.limit: int | None = None
        self._model = model
        self._factors = prescale_factor, postscale_factor
        self._grouped = False       # the user has grouped the gradients

    def rename(self, name: str) -> None:
        """Changes the name."""
        self.name = name
        self.name_buckets()

    def name_buckets(self, suffix: str = "") -> None:
        """Names the buckets by their indices, with a suffix."""
        for place, bucket in enumerate(self._model.gradients):
            bucket.name = f"{self.name}.{place}{suffix}"

    def add(self, members: Sequence[Member], groups: Sequence[Sequence[int]] | None) -> None:
        """Adds members, numbered after the existing ones, in new buckets. groups: indices that share buckets."""
        numbered = dict(enumerate(members, len(self.members)))
        self.members = [*self.members, *members]
        self._grouped = self._grouped or groups is not None
        self.bucket_of = [*self.bucket_of, *[None] * len(members)]
        self._add_buckets(partition(numbered, self.limit) if groups is None else partition_groups(numbered, groups))
        self._model.add(numbered)

    def _add_buckets(self, plan: Iterable[Sequence[int]]) -> None:
        for indices in plan:
            members = {index: self.members[index] for index in indices}
            bucket = Bucket(f"{self.name}.{len(self._model.gradients)}", members, *self._factors, model=self._model)
            self._model.gradients.append(bucket)
            for index in indices:
                self.bucket_of[index] = bucket

    def remove(self, index: int) -> None:
        """Takes a gradient out of its bucket: it is communicated by itself from now on."""
        bucket = self.bucket_of[index]
        if bucket is not None:
            bucket.remove(index)
            self.bucket_of[index] = None
            if not bucket.members:
                self._model.gradients.remove(bucket)
                self.name_buckets()

    def bucketed(self) -> list[int]:
        """All gradients in buckets, in the order of the buckets."""
        return [index for bucket in self._model.gradients for index in bucket.members]

    def order(self, ready: Iterable[int] | None) -> list[int]:
        """All gradients in bucket order: first the ready ones; None: first those in buckets, as they are."""
        first = dict.fromkeys(self.bucketed() if ready is None else ready)
        return [*first, *(index for index in reversed(range(len(self.members))) if index not in first)]

    def arrange(self, order: Iterable[int], limit: int | None) -> None:
        """Rebuilds the buckets if the order or the limit has changed; the user's groups are kept."""
        order = [index for index in order if self.bucket_of[index] is not None]
        if not self._grouped and (order, limit) != (self.bucketed(), self.limit):
            self.limit = limit
            self._cut(partition({index: self.members[index] for index in reversed(order)}, limit))

    def restore(self, plan: Sequence[Sequence[int]], limit: int | None = None) -> bool:
        """Rebuilds the buckets as in a checkpoint. Returns whether it did; the user's groups are kept.

        Args:
            plan: the indices in each bucket. Members that are not in it follow in buckets of their own.
            limit: the bucket size of the plan.
        """
        planned = {index for indices in plan for index in indices}
        kinds = [{(self.members[index].dtype, self.members[index].device) for index in indices} for indices in plan]
        if self._grouped or not planned <= set(self.bucketed()) or any(len(kind) > 1 for kind in kinds):
            return False
        self.limit = limit
        rest = {index: self.members[index] for index in reversed(self.bucketed()) if index not in planned}
        self._cut([*plan, *partition(rest, limit)])
        return True

    def _cut(self, plan: Iterable[Sequence[int]]) -> None:
        self._model.gradients = []
        self._add_buckets(plan)
