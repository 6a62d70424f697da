"""Converts c10d's tensors for the core, and reduces where the core has no kernel."""
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from bagua_hvd.core import native
from bagua_hvd.torch.frontend import DTYPES, frontend

Tensors = list[torch.Tensor]

_Op = ReduceOp.RedOpType
_NATIVE_OPS = {
    _Op.SUM: native.OP_SUM, _Op.AVG: native.OP_AVERAGE, _Op.MIN: native.OP_MIN, _Op.MAX: native.OP_MAX,
    _Op.PRODUCT: native.OP_PRODUCT, _Op.PREMUL_SUM: native.OP_SUM,
}
_BINARY = {
    _Op.SUM: torch.add, _Op.AVG: torch.add, _Op.MIN: torch.minimum, _Op.MAX: torch.maximum, _Op.PRODUCT: torch.mul,
    _Op.BAND: torch.bitwise_and, _Op.BOR: torch.bitwise_or, _Op.BXOR: torch.bitwise_xor,
}


def kind_of(op: Any) -> Any:
    """The RedOpType of opts.reduceOp."""
    return getattr(op, "op", op)


def prescale_of(op: Any) -> Any:
    """The factor that PREMUL_SUM applies before the sum; 1 for other operations."""
    return float(op.__getstate__()[1]) if kind_of(op) == _Op.PREMUL_SUM else 1.0


def native_op(tensors: Sequence[torch.Tensor], op: Any) -> int | None:
    """The core's reduction; None: it has none for this operation or these dtypes."""
    return _NATIVE_OPS.get(kind_of(op)) if all(DTYPES.get(t.dtype) in frontend.reducible for t in tensors) else None


def reduce_rows(rows: torch.Tensor, op: Any) -> torch.Tensor:
    """Reduces a tensor over its first dimension, in the order of the ranks, in its own dtype.

    Means of integers equal the core's: the exact sum, divided and truncated.
    """
    kind = kind_of(op)
    if kind not in _BINARY:
        raise ValueError(f"{kind} is not supported for {rows.dtype}")
    rounding = None if rows.is_floating_point() or rows.is_complex() else "trunc"
    terms = rows.long() if kind == _Op.AVG and rounding else rows
    try:
        result = functools.reduce(_BINARY[kind], terms.unbind(0))
    except NotImplementedError:     # torch's message names a kernel
        raise ValueError(f"{kind} is not supported for {rows.dtype}") from None
    if kind == _Op.AVG:
        result = torch.div(result, rows.shape[0], rounding_mode=rounding)
    return result.to(rows.dtype)


def dense(tensor: torch.Tensor) -> Any:
    """The tensor, or a contiguous copy of it, detached."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are supported by all_reduce only")
    return tensor.contiguous().resolve_neg().resolve_conj()


def movable(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as 1-D, in its own dtype if the core supports that, else as bytes."""
    return _flat(tensor) if tensor.dtype in DTYPES else _flat(tensor).view(torch.uint8)


def _flat(tensor):
    # One element counts as contiguous with any stride, and reshape() would keep that.
    return tensor.as_strided((tensor.numel(),), (1,))


def row(tensor: torch.Tensor) -> Any:
    """The tensor as one row, shape (1, count): ranks whose rows differ in length or dtype get an error."""
    return movable(tensor).unsqueeze(0)


def rows_of(tensor: torch.Tensor, count: int) -> Any:
    """A contiguous tensor as `count` rows of equal length.

    Raises:
        ValueError: `count` does not divide the number of elements.
    """
    if tensor.numel() % count:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be shared evenly by {count} ranks")
    return _flat(tensor).view(count, tensor.numel() // count)


def apart(sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Tensors:
    """Returns contiguous sources, copied where they share memory with their results, as in FSDP.

    The core reads the source while it writes the result.
    """
    return [source.clone() if source.data_ptr() < result.data_ptr() + result.nbytes
            and result.data_ptr() < source.data_ptr() + source.nbytes else source
            for source, result in zip(sources, results, strict=True)]


def copying(outputs: Sequence[torch.Tensor], results: Any) -> Any:
    """A function that copies results to the outputs; None if they are already there.

    Args:
        results: tensors with as many elements as the outputs, or a function that returns them.
    """
    if not callable(results) and all(map(_same_place, outputs, results)):
        return None

    def copy():
        for output, result in zip(outputs, results() if callable(results) else results, strict=True):
            if not _same_place(output, result):
                output.detach().copy_(result.view(output.shape))

    return copy


def _same_place(output, result):
    return output.data_ptr() == result.data_ptr()
