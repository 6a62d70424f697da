"""What travels one step late: a bucket's gradients, of which the average comes back in the next step.

    gradients g_t, here the average of g_{t-1}  ->  swap()  ->  gradients are that average, g_t is here, and travels

Memory changes hands, where the framework lets go of it (Source.hand_over). Else both are copied.

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
    """The same memory without its dtype: bfloat16 is none of NumPy's."""
    return [view._replace(shape=(vectors.count_of(view) * native.dtype_size(view.dtype),), dtype=native.UINT8)
            for view in views]


class Late:
    """Values shaped and typed as some tensors, zeros at first; on the host, or in memory that was handed over.

    Args:
        views: TensorViews of those, of one dtype.
    """

    def __init__(self, views: Sequence[TensorView]) -> None:
        self._dtype = views[0].dtype
        self._shapes = [view.shape for view in views]
        self._here: np.ndarray = np.zeros(sum(view.shape[0] for view in _as_bytes(views)), np.uint8)
        self._other = np.empty_like(self._here)
        self._given: Views | None = None        # handed over; in place of what is here

    def fits(self, views: Sequence[TensorView]) -> bool:
        """Whether tensors are of these shapes and this dtype."""
        return self._shapes == [view.shape for view in views] and self._dtype == views[0].dtype

    def swap(self, views: Sequence[TensorView], hand_over: HandOver = lambda given: None) -> None:
        """Exchanges what is here for what is in the tensors. Nothing of it may be on its way.

        hand_over: as Source.hand_over of these tensors.
        """
        handed = hand_over(self._given)
        if handed is not None:
            before, now = handed
            if self._given is None:
                vectors.unpack(_as_bytes(now), self._here)
            self._given = before
            return
        self._take_back()
        vectors.pack(_as_bytes(views), self._other)
        vectors.unpack(_as_bytes(views), self._here)
        self._here, self._other = self._other, self._here

    def _take_back(self) -> None:
        if self._given is not None:
            vectors.pack(_as_bytes(self._given), self._here)
            self._given = None

    @property
    def views(self) -> Views:
        """In-place TensorViews of what is here, until the next swap()."""
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
        """Whether there is neither a NaN nor an infinity."""
        return bool(np.isfinite(self._floats()).all())

    def scale(self, factor: float) -> None:
        """Multiplies the values: the gradients' unit has changed."""
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
