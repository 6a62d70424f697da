"""NumPy arrays, bytes and flat vectors as tensors of the core (native.TensorView)."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView, call, dtype_name, dtype_size, ffi, lib
from bagua_hvd.core.operations import tensor_array

if TYPE_CHECKING:           # this layer avoids importing NumPy where it can
    import numpy as np

_FLOAT_POINTER = ffi.typeof("float *")
Buffer = bytes | bytearray | memoryview | Any      # bytes-like
# By NumPy's names; bfloat16 is the dtype of ml_dtypes, which frameworks depend on.
DTYPES = {dtype_name(dtype): dtype for dtype in range(lib.BHVD_DTYPE_COUNT)}


def bytes_view(source: Buffer) -> TensorView:
    """A uint8 TensorView of a bytes-like object, in place."""
    return gathered_view(source)._replace(dst=int(ffi.cast(native.UINTPTR, ffi.from_buffer(source))))


def gathered_view(source: Buffer) -> TensorView:
    """A uint8 TensorView that reads a bytes-like object; the core allocates the result."""
    src = ffi.from_buffer(source)
    return TensorView(int(ffi.cast(native.UINTPTR, src)), 0, (len(src),), native.UINT8, src)


def native_order(value: Any) -> Any:
    """Converts a NumPy array to this machine's byte order; returns everything else as it is."""
    if getattr(getattr(value, "dtype", None), "isnative", True):        # other libraries' dtypes have no byte order
        return value
    return value.astype(value.dtype.newbyteorder("="))


def array_view(array: Any, out: Any = None) -> TensorView:
    """The TensorView of a NumPy array; in place, or with results in `out`.

    Args:
        array: contiguous, of a dtype of the core (for bfloat16, the dtype of the package ml_dtypes).
        out: an array of the same shape and dtype.
    Raises:
        ValueError: another dtype, not contiguous, or `out` is read-only or does not fit. TypeError: not an array.
    """
    out = array if out is None else out
    if not (hasattr(array, "ctypes") and hasattr(out, "ctypes")):
        raise TypeError(f"a NumPy array is expected, not {type(array).__name__} and {type(out).__name__}")
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise ValueError(f"arrays of dtype {array.dtype} cannot be sent; use one of {', '.join(DTYPES)}")
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(f"out is {out.dtype}{list(out.shape)}, but the array {array.dtype}{list(array.shape)}")
    if not (array.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("the array must be contiguous and the output array writable: pass a copy")
    return TensorView(array.ctypes.data, out.ctypes.data, array.shape, dtype, (array, out))


def count_of(view: TensorView) -> int:
    """Number of elements of a TensorView."""
    return math.prod(view.shape)


def views_into(views: Sequence[TensorView], out: np.ndarray) -> list[TensorView]:
    """Copies of the TensorViews with their results one after the other in `out`, a contiguous NumPy array.

    Raises:
        ValueError: `out` has another number of elements or element size, or is read-only.
    """
    size, count = dtype_size(views[0].dtype), sum(map(count_of, views))
    if (out.size != count or out.itemsize != size or not out.dtype.isnative
            or not (out.flags.c_contiguous and out.flags.writeable)):
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)}: expected {count} elements of {size} bytes, contiguous and writable"
        )
    moved, address = [], out.ctypes.data
    for view in views:
        moved.append(view._replace(dst=address, owner=(view.owner, out), dst_on_host=view.placement is not None))
        address += count_of(view) * size
    return moved


def floats(array: np.ndarray | None) -> Any:
    """Pointer to a contiguous, writable float32 NumPy array, for the fields of a primitive; native.NULL for None."""
    return native.NULL if array is None else ffi.cast(_FLOAT_POINTER, array.ctypes.data)


class DeviceArray:
    """A contiguous float32 host array whose newest values may be on a GPU, where an operation left them.

    Args:
        array: the host array. Between operations its content is undefined until `fetch()`.
    Attributes:
        pointer, floats: the fields of an operation. size: number of elements.
    """

    def __init__(self, array: np.ndarray) -> None:
        if array_view(array).dtype != native.FLOAT32:
            raise ValueError(f"{array.dtype}{list(array.shape)} is kept by the core as float32: convert it")
        self.array, self.size, self.floats = array, array.size, floats(array)
        self.pointer = ffi.gc(lib.bhvd_device_array_create(self.floats, self.size), lib.bhvd_device_array_destroy)
        if self.pointer == native.NULL:
            raise MemoryError("no memory for the device copy of an array")

    def copy(self, array: np.ndarray) -> DeviceArray:
        """A DeviceArray over another array of the same size, with the newest values; they stay on their GPU.

        Raises:
            HorovodInternalError: the GPU failed.
        """
        other = DeviceArray(array)
        call(lib.bhvd_device_array_copy, other.pointer, self.pointer)
        return other

    def fetch(self) -> np.ndarray:
        """The host array with the newest values, to read and write until the next operation. Waits for the GPU.

        Raises:
            HorovodInternalError: the GPU failed.
        """
        call(lib.bhvd_device_array_fetch, self.pointer)
        return self.array


def pack(tensors: Sequence[TensorView], flat: np.ndarray) -> None:
    """Copies tensors into a flat NumPy array, one after the other.

    Args:
        tensors: TensorViews with `flat.size` elements in total: of any floating dtype if `flat` is float32 (rounded to
            nearest even), else of its dtype.
        flat: contiguous, 1-D.
    Raises:
        ValueError: sizes or dtypes do not fit.
    """
    _move_flat(lib.bhvd_pack, _on_host(tensors), flat)


def unpack(tensors: Sequence[TensorView], flat: np.ndarray) -> None:
    """Copies a flat NumPy array into the result memory (dst) of tensors: the inverse of pack(), with its arguments."""
    buffers = tensors if _placement(tensors) is None else [_host_buffer(view) for view in tensors]
    _move_flat(lib.bhvd_unpack, buffers, flat)
    _to_device(buffers, tensors)


def unpack_add(tensors: Sequence[TensorView], flat: np.ndarray) -> None:
    """Adds a flat NumPy array of float32 or float64 to tensors. Sums are rounded once to the tensors' dtype."""
    buffers = _on_host(tensors)
    _move_flat(lib.bhvd_unpack_add, buffers, flat)
    _to_device(buffers, tensors)


def adam_momentum(m: Sequence[TensorView], v: Sequence[TensorView], g: Sequence[TensorView],
                  x: Sequence[TensorView] | None, numbers: Sequence[dict[str, float]], in_steps: bool,
                  sent: np.ndarray) -> None:
    """bhvd_adam_momentum: writes m's new values to `sent`, a flat float32 or float64 array. x: None: no weight decay.

    Args:
        m, v, g, x: TensorViews of `sent.size` elements each, of dtypes as for pack().
        numbers: for each tensor, the fields of a struct bhvd_adam.
    Raises:
        ValueError: sizes or dtypes do not fit.
    """
    _compute(lib.bhvd_adam_momentum, (m, v, g, x), (), "struct bhvd_adam[]", numbers, sent, in_steps)


def adam_step(m: Sequence[TensorView], v: Sequence[TensorView], x: Sequence[TensorView],
              numbers: Sequence[dict[str, float]], in_steps: bool, sent: np.ndarray) -> None:
    """bhvd_adam_step: writes new values to m and x; arguments and errors as for adam_momentum()."""
    _compute(lib.bhvd_adam_step, (m, v, x), (0, 2), "struct bhvd_adam[]", numbers, sent, in_steps)


def adam_variance(v: Sequence[TensorView], g: Sequence[TensorView], numbers: Sequence[dict[str, float]],
                  exact: np.ndarray, own: np.ndarray) -> None:
    """bhvd_adam_variance: new values for v, `exact` and `own`; numbers: the fields of a struct bhvd_adam_variance."""
    array_view(own)
    if own.size != exact.size or own.dtype != exact.dtype:
        raise ValueError(f"variances of {exact.dtype}{list(exact.shape)} and {own.dtype}{list(own.shape)}")
    _compute(lib.bhvd_adam_variance, (v, g), (0,), "struct bhvd_adam_variance[]", numbers, exact, None,
             ffi.cast(native.VOID_POINTER, own.ctypes.data))


def _compute(function: Callable[..., int], lists: Sequence[Sequence[TensorView] | None], written: Sequence[int],
             kind: str, numbers: Sequence[dict[str, float]], flat: np.ndarray, in_steps: bool | None,
             *more: Any) -> None:
    """Calls one of the three functions. A list that is None is passed as NULL. written: the places of changed lists."""
    view = array_view(flat)
    buffers = [None if tensors is None else _on_host(tensors) for tensors in lists]
    for tensors in lists:
        count = flat.size if tensors is None else sum(map(count_of, tensors))
        if count != flat.size or len(tensors or numbers) != len(numbers):
            raise ValueError(f"{len(tensors or numbers)} tensors of {count} elements do not fit a flat array of "
                             f"{flat.size} elements with parameters for {len(numbers)} tensors")
    arrays = [(native.NULL, None) if tensors is None else tensor_array(tensors) for tensors in buffers]
    flags = [] if in_steps is None else [in_steps]
    if function(*(array for array, _ in arrays), ffi.new(kind, list(numbers)), len(numbers), *flags, view.dtype,
                ffi.cast(native.VOID_POINTER, view.src), *more) != native.OK:
        names = sorted({dtype_name(tensor.dtype) for tensors in lists for tensor in tensors or ()})
        raise ValueError(f"tensors of {', '.join(names)} cannot be computed with as {flat.dtype}")
    for place in written:
        _to_device(buffers[place] or (), lists[place] or ())


def _placement(tensors: Sequence[TensorView]) -> Any:
    """The placement that all the tensors share; None on the host."""
    return tensors[0].placement if tensors else None


def _to_device(buffers: Sequence[TensorView], tensors: Sequence[TensorView]) -> None:
    """Copies host buffers to the result memory of tensors on a GPU; does nothing for tensors on the host."""
    placement = _placement(tensors)
    if placement is not None:
        placement.device.copy([buffer._replace(dst=view.dst) for buffer, view in zip(buffers, tensors, strict=True)],
                              placement.stream())


def _host_buffer(view: TensorView) -> TensorView:
    """A TensorView of new host memory, with the shape and dtype of `view`."""
    memory = ffi.new(native.CHARS, count_of(view) * dtype_size(view.dtype) or 1)
    address = int(ffi.cast(native.UINTPTR, memory))
    return TensorView(address, address, view.shape, view.dtype, memory)


def _on_host(tensors: Sequence[TensorView]) -> Sequence[TensorView]:
    """The tensors themselves, or host copies if they are on a GPU. Blocks until the copies are done."""
    placement = _placement(tensors)
    if placement is None:
        return tensors
    buffers = [_host_buffer(view) for view in tensors]
    placement.device.copy([buffer._replace(src=view.src) for buffer, view in zip(buffers, tensors, strict=True)],
                          placement.stream())
    return buffers


def _move_flat(move: Callable[..., int], tensors: Sequence[TensorView], flat: np.ndarray) -> None:
    view = array_view(flat)
    count = sum(map(count_of, tensors))
    if flat.ndim != 1 or flat.size != count:
        raise ValueError(f"tensors of {count} elements do not fit a flat array of shape {list(flat.shape)}")
    array, _shapes = tensor_array(tensors)
    if move(array, len(tensors), view.dtype, ffi.cast(native.VOID_POINTER, view.src)) != native.OK:
        names = sorted({dtype_name(tensor.dtype) for tensor in tensors})
        raise ValueError(f"tensors of {', '.join(names)} cannot be one flat array of {flat.dtype}")
