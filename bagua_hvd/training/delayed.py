"""Gradients that are applied one step late: the average of a bucket arrives in the next step.

    gradients g_t, here the average of g_{t-1}  ->  swap()  ->  gradients are that average, g_t is here, in flight

Buffers are exchanged if the framework can release its own (Source.hand_over). Else both are copied.

Source: Li et al., Pipe-SGD, arXiv:1811.03619, with a width of two.
"""
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bagua_hvd.core import native, vectors
from bagua_hvd.core.native import TensorView

Views = list[TensorView]
HandOver = Callable[[Views | None], tuple[Views, Views] | None]


def _as_bytes(views: Sequence[TensorView]) -> list[TensorView]:
    """The same memory as bytes, since NumPy has no bfloat16."""
    return [view._replace(shape=(vectors.count_of(view) * native.dtype_size(view.dtype),), dtype=native.UINT8)
            for view in views]


class DelayedGradients:
    """Values with the shapes and the dtype of some tensors, zeros at first; on the host, or in memory handed over.

    Args:
        views: TensorViews of these tensors, of one dtype.
    """

    def __init__(self, views: Sequence[TensorView]) -> None:
        self._dtype = views[0].dtype
        self._shapes = [view.shape for view in views]
        self._here: np.ndarray = np.zeros(sum(view.shape[0] for view in _as_bytes(views)), np.uint8)
        self._other = np.empty_like(self._here)
        self._given: Views | None = None        # handed over; used instead of _here

    def fits(self, views: Sequence[TensorView]) -> bool:
        """Whether tensors have these shapes and this dtype."""
        return self._shapes == [view.shape for view in views] and self._dtype == views[0].dtype

    def swap(self, views: Sequence[TensorView], hand_over: HandOver = lambda given: None) -> None:
        """Swaps these values with those of the tensors. None of them may be in flight.

        hand_over: like Source.hand_over, for these tensors.
        """
        handed = hand_over(self._given)
        if handed is not None:
            before, now = handed
            if self._given is None:
                vectors.unpack(_as_bytes(now), self._here)
            self._given = before
            return
        if self._given is not None:
            vectors.pack(_as_bytes(self._given), self._here)
            self._given = None
        vectors.pack(_as_bytes(views), self._other)
        vectors.unpack(_as_bytes(views), self._here)
        self._here, self._other = self._other, self._here

    @property
    def views(self) -> Views:
        """In-place TensorViews of these values, valid until the next swap()."""
        if self._given is not None:
            return self._given
        address, size, views = self._here.ctypes.data, native.dtype_size(self._dtype), []
        for shape in self._shapes:
            views.append(TensorView(address, address, shape, self._dtype, self._here))
            address += vectors.count_of(views[-1]) * size
        return views

    def _floats(self) -> np.ndarray:
        wide = np.float64 if self._dtype == native.FLOAT64 else np.float32
        floats: np.ndarray = np.empty(self._here.size // native.dtype_size(self._dtype), wide)
        vectors.pack(self.views, floats)
        return floats

    def finite(self) -> bool:
        """Whether all values are finite."""
        return bool(np.isfinite(self._floats()).all())

    def scale(self, factor: float) -> None:
        """Multiplies the values, after the gradients' unit has changed."""
        vectors.unpack(self.views, self._floats() * np.float32(factor))

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:
            vectors.pack(_as_bytes(self._given), self._here)
        return {"dtype": native.dtype_name(self._dtype), "data": self._here.tobytes()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size or dtype."""
        if state["dtype"] != native.dtype_name(self._dtype) or len(state["data"]) != self._here.size:
            return False
        self._given = None
        self._here[:] = np.frombuffer(state["data"], np.uint8)
        return True
