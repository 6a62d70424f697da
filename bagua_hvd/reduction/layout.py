"""Which gradient lies in which bucket: in the order in which gradients become ready, as the user says, or by itself."""
from collections.abc import Iterable, Sequence

from bagua_hvd.training.buckets import Bucket, Member, partition, partition_groups
from bagua_hvd.training.model import Model


class Layout:
    """The gradients of a model, and its buckets of them.

    Args:
        model: whose `gradients` are the buckets. prescale_factor, postscale_factor: see Bucket.
    Attributes:
        name: of all buckets, behind which comes their place. members: by index.
        bucket_of: by index; None: it travels by itself.
        limit: bytes in a bucket; None: BAGUA_DEFAULT_BUCKET_SIZE.
    """

    def __init__(self, model: Model, prescale_factor: float, postscale_factor: float) -> None:
        self.name = ""
        self.members: list[Member] = []
        self.bucket_of: list[Bucket | None] = []
        self.limit: int | None = None
        self._model = model
        self._factors = prescale_factor, postscale_factor
        self._grouped = False       # the user has said what travels together

    def rename(self, name: str) -> None:
        """Changes the name."""
        self.name = name
        self.name_buckets()

    def name_buckets(self, suffix: str = "") -> None:
        """Names the buckets by their places, with something behind that."""
        for place, bucket in enumerate(self._model.gradients):
            bucket.name = f"{self.name}.{place}{suffix}"

    def add(self, members: Sequence[Member], groups: Sequence[Sequence[int]] | None) -> None:
        """More members, numbered on from those before, in buckets of their own. groups: those that travel together."""
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
        """Takes a gradient out of its bucket: it travels by itself from now on."""
        bucket = self.bucket_of[index]
        if bucket is not None:
            bucket.remove(index)
            self.bucket_of[index] = None
            if not bucket.members:
                self._model.gradients.remove(bucket)
                self.name_buckets()

    def bucketed(self) -> list[int]:
        """All gradients that are in buckets, in their order."""
        return [index for bucket in self._model.gradients for index in bucket.members]

    def order(self, ready: Iterable[int] | None) -> list[int]:
        """All gradients, as the buckets are to hold them: first those that have become ready, None: as they are."""
        first = dict.fromkeys(self.bucketed() if ready is None else ready)
        return [*first, *(index for index in reversed(range(len(self.members))) if index not in first)]

    def arrange(self, order: Iterable[int]) -> bool:
        """Cuts the buckets anew if the order is another. Returns whether it was; the user's groups stay as they are."""
        order = [index for index in order if self.bucket_of[index] is not None]
        if order == self.bucketed() or self._grouped:
            return False
        self._cut(partition({index: self.members[index] for index in reversed(order)}, self.limit))
        return True

    def resize(self, limit: int | None) -> bool:
        """Cuts the buckets to another limit, in the order that they have. Returns whether it was another."""
        if limit == self.limit or self._grouped:
            return False
        self.limit = limit
        self._cut(partition({index: self.members[index] for index in reversed(self.bucketed())}, limit))
        return True

    def restore(self, plan: Sequence[Sequence[int]], limit: int | None = None) -> bool:
        """Cuts the buckets as in a checkpoint. Returns whether it did; the user's groups stay as they are.

        Args:
            plan: the indices in each bucket. Members that it lacks are in buckets of their own, behind.
            limit: what the buckets were cut by.
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
