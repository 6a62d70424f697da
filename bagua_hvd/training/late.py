"""What travels one step late: a copy of a bucket's gradients, of which the average comes back in the next step.

    gradients g_t, here the average of g_{t-1}  ->  swap()  ->  gradients are that average, g_t is here, and travels

Source: Li et al., Pipe-SGD, arXiv:1811.03619, with a width of two.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np

from bagua_hvd.core import native, vectors
from bagua_hvd.core.native import TensorView


def _as_bytes(views: Sequence[TensorView]) -> list[TensorView]:
    """The same memory without its dtype: bfloat16 is none of NumPy's."""
    return [view._replace(shape=(vectors.count_of(view) * native.dtype_size(view.dtype),), dtype=native.UINT8)
            for view in views]


class Late:
    """Values shaped and typed as some tensors, on the host; zeros at first.

    Args:
        views: TensorViews of those, of one dtype.
    """

    def __init__(self, views: Sequence[TensorView]) -> None:
        self._dtype = views[0].dtype
        self._shapes = [view.shape for view in views]
        self._here: np.ndarray = np.zeros(sum(view.shape[0] for view in _as_bytes(views)), np.uint8)
        self._other = np.empty_like(self._here)

    def fits(self, views: Sequence[TensorView]) -> bool:
        """Whether tensors are of these shapes and this dtype."""
        return self._shapes == [view.shape for view in views] and self._dtype == views[0].dtype

    def swap(self, views: Sequence[TensorView]) -> None:
        """Exchanges what is here for what is in the tensors. Nothing of it may be on its way."""
        vectors.pack(_as_bytes(views), self._other)
        vectors.unpack(_as_bytes(views), self._here)
        self._here, self._other = self._other, self._here

    @property
    def views(self) -> list[TensorView]:
        """In-place TensorViews of what is here, until the next swap()."""
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
        return {"dtype": native.dtype_name(self._dtype), "data": self._here.tobytes()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size or dtype."""
        if state["dtype"] != native.dtype_name(self._dtype) or len(state["data"]) != self._here.size:
            return False
        self._here[:] = np.frombuffer(state["data"], np.uint8)
        return True
