"""The collective operations of a group, with the names and arguments of c10d.

If the core lacks a reduction, tensors are gathered and reduced here.
"""
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from bagua_hvd.collectives import rules
from bagua_hvd.core import native
from bagua_hvd.torch.distributed.base import Group
from bagua_hvd.torch.distributed.works import Work
from bagua_hvd.torch.frontend import DTYPES, frontend
from bagua_hvd.torch.sparse import SparseSum

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


def core_op(tensors: Sequence[torch.Tensor], op: Any) -> int | None:
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


class Operations(Group):
    """A group with its collective operations."""

    # -------------------------------------------------------------------------------- operations that only move ----

    def broadcast(self, given: Tensors, opts: Any) -> Work:
        name, what = self._begin("broadcast")
        sources = [dense(tensor) for tensor in given]
        flat = [movable(source) for source in sources]
        operation = self._post(native.BROADCAST, name, [frontend.view(t, t) for t in flat], opts,
                               root_rank=self._ranks[opts.rootRank])
        return self._work(operation, given, what, opts, copying(given, sources))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._gather_rows(outputs, inputs, opts, "all_gather_into_tensor")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_rows(self, outputs, inputs, opts, what):
        """Gathers each input into an output that has a row, or a part of equal size, for each rank."""
        name, what = self._begin(what)
        size = len(self._ranks)
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != size * given.numel() or output.dtype != given.dtype:
                raise ValueError(f"{what}: {size} ranks give {size * given.numel()} elements of {given.dtype}, but the "
                                 f"output holds {output.numel()} of {output.dtype}")
        sources = [dense(tensor) for tensor in inputs]
        straight = self._places is None
        results = [dense(output) if straight else torch.empty_like(output, memory_format=torch.contiguous_format)
                   for output in outputs]
        sources = apart(sources, results)
        operation = self._post(native.ALLGATHER, name,
                               [frontend.view(row(s), r) for s, r in zip(sources, results, strict=True)], opts)
        return self._work(operation, outputs, what, opts, copying(
            outputs, results if straight else lambda: [r.view(size, -1)[self._places] for r in results]))

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        outputs, given = self._one(output_lists, "allgather"), self._one(inputs, "allgather")
        if len(outputs) != len(self._ranks):
            raise ValueError(f"all_gather: {len(outputs)} outputs for {len(self._ranks)} ranks")
        if any(output.numel() != given.numel() for output in outputs):
            name, what = self._begin("all_gather of different sizes")
            return self._exchange(dict(enumerate(outputs)), dict.fromkeys(range(len(outputs)), given), opts, name, what)
        return self._allgather([outputs], [given], opts, "all_gather")

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        # Given by rank, needed by tensor.
        return self._allgather([list(of_tensor) for of_tensor in zip(*output_lists, strict=True)], inputs, opts,
                               "all_gather_coalesced")

    def _allgather(self, output_lists, inputs, opts, what):
        gathered = [dense(given).new_empty((len(self._ranks), *given.shape)) for given in inputs]
        outputs = [output for of_tensor in output_lists for output in of_tensor]
        return self._gather_rows(gathered, inputs, opts, what).then(
            copying(outputs, lambda: [part for rows in gathered for part in rows]), outputs)

    def _take_parts(self, operation, views, like, outputs, what, received):
        """Copies the core's result, the concatenated parts of the ranks, into `outputs`, a dict by rank.

        received: number of elements from each rank.
        """
        [whole] = rules.results(frontend, operation, views, [like])
        counts = {rank: movable(dense(outputs[rank])).numel() for rank in sorted(outputs, key=self._place)}
        for rank, count in received.items():
            if count != counts.get(rank, 0):
                raise ValueError(f"{what}: rank {rank} sent {count} elements, but its output holds "
                                 f"{counts.get(rank, 0)}")
        for rank, part in zip(counts, whole.split(list(counts.values())), strict=True):
            outputs[rank].detach().copy_(part.view(outputs[rank].dtype).view(outputs[rank].shape))

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        given = self._one(inputs, "gather")
        name, what = self._begin("gather")
        outputs = self._by_rank(output_lists, what) if opts.rootRank == self._rank else {}
        return self._exchange(outputs, {opts.rootRank: given}, opts, name, what)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> Work:
        output = self._one(outputs, "scatter")
        name, what = self._begin("scatter")
        inputs = self._by_rank(input_lists, what) if opts.rootRank == self._rank else {}
        return self._exchange({opts.rootRank: output}, inputs, opts, name, what)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, output_splits: list[int],
                          input_splits: list[int], opts: Any = None) -> Work:
        name, what = self._begin("all_to_all_single")
        source, result = dense(given), dense(output)
        sent, received = (dict(enumerate(tensor.view(-1).split(self._counts(splits, tensor, what))))
                          for splits, tensor in ((input_splits, source), (output_splits, result)))
        work = self._exchange(received, sent, opts, name, what, source)
        return work.then(copying([output], [result]), [output])

    def _counts(self, splits, tensor, what):
        """Elements for each rank. ValueError: the splits do not fit the tensor."""
        size = len(self._ranks)
        rows = tensor.shape[0] if tensor.dim() else 1
        splits = list(splits or ()) or [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"{what}: split sizes {splits} for {size} ranks do not fit a tensor of {rows} rows")
        width = tensor.numel() // rows if rows else 0
        return [split * width for split in splits]

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        name, what = self._begin("all_to_all")
        return self._exchange(self._by_rank([outputs], what), self._by_rank([inputs], what), opts, name, what)

    def _by_rank(self, lists, what):
        """The only list in `lists`, one tensor for each rank, as a dict by rank."""
        given = self._one(lists, what)
        if len(given) != len(self._ranks):
            raise ValueError(f"{what}: {len(given)} tensors for {len(self._ranks)} ranks")
        return dict(enumerate(given))

    def _exchange(self, outputs, inputs, opts, name, what, flat=None):
        """Sends `inputs` and receives into `outputs`, both dicts by rank. Sizes may differ.

        The core allocates received data: only after receipt is it known whether it fits the outputs.

        Args:
            flat: the inputs as one tensor, if they are contiguous.
        """
        if len(dtypes := {tensor.dtype for tensor in (*outputs.values(), *inputs.values())}) > 1:
            raise ValueError(f"{what}: its tensors are of different dtypes: {', '.join(sorted(map(str, dtypes)))}")
        order = sorted(range(len(self._ranks)), key=self._place)
        nothing = next(iter({**outputs, **inputs}.values())).detach().new_empty(0)
        parts = [movable(dense(inputs.get(rank, nothing))) for rank in order]
        flat = torch.cat(parts) if flat is None or self._places is not None else movable(flat)
        views = [frontend.view(flat)]
        operation = self._post(native.ALLTOALL, name, views, splits=[part.numel() for part in parts])

        def finish():
            splits = operation.received_splits(0, len(order))
            self._take_parts(operation, views, flat, outputs, what, dict(zip(order, splits, strict=True)))

        return self._work(operation, list(outputs.values()), what, opts, finish)

    # --------------------------------------------------------------------------------- operations that reduce ----

    _warned = False     # whether it has warned that pg_options do not apply

    def allreduce(self, given: Tensors, opts: Any = None) -> Work:
        opts = dist.AllreduceOptions() if opts is None else opts
        tensor = self._one(given, "allreduce")
        if tensor.is_sparse:
            return self._reduce_sparse(tensor, opts)
        return self._reduce(given, given, opts, "all_reduce")

    def _reduce_sparse(self, tensor, opts):
        """Sums, in place; the result is coalesced. ValueError: any other reduction than a sum or mean."""
        kind = kind_of(opts.reduceOp)
        if kind not in (_Op.SUM, _Op.AVG):
            raise ValueError(f"sparse tensors are reduced by SUM and AVG only, not {opts.reduceOp}")
        name, what = self._begin("all_reduce of a sparse tensor")
        total = SparseSum(tensor.detach().coalesce(), name, self._set, kind == _Op.AVG,
                          blocking=not getattr(opts, "asyncOp", True))
        return self._work(total.operation, [tensor], what, opts, functools.partial(total.write, tensor))

    def allreduce_coalesced(self, given: Tensors, opts: Any = None) -> Work:
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        return self._reduce(given, given, opts, "all_reduce_coalesced")

    def reduce(self, given: Tensors, opts: Any) -> Work:
        mine = opts.rootRank == self._rank
        return self._reduce(given, given if mine else [torch.empty_like(dense(t)) for t in given], opts, "reduce")

    def _reduce(self, inputs, outputs, opts, what):
        """Reduces all tensors in one operation. outputs: the same tensors, or others of the same shapes."""
        op = opts.reduceOp
        sources = [dense(tensor) for tensor in inputs]
        native_op = core_op(sources, op)
        if native_op is None:
            gathered = [source.new_empty((len(self._ranks), *source.shape)) for source in sources]
            return self._gather_rows(gathered, sources, opts, what).then(
                copying(outputs, lambda: [reduce_rows(rows, op) for rows in gathered]), outputs)
        may_relax = self.options.relaxed and what.startswith("all_reduce")
        name, what = self._begin(what)
        results = sources if outputs is inputs else outputs
        operation = None
        if may_relax and len(sources) == 1 and native_op in (native.OP_SUM, native.OP_AVERAGE):
            relaxed = self.options.communicate(sources[0], name, self._number, self._set,
                                               native_op == native.OP_AVERAGE, prescale_of(op))
            operation = None if relaxed is None else self._waiter(relaxed, sources[0])
        if operation is None:
            operation = self._post(
                native.ALLREDUCE, name, [frontend.view(s, r) for s, r in zip(sources, results, strict=True)], opts,
                op=native_op, prescale_factor=prescale_of(op),
            )
        return self._work(operation, outputs, what, opts, copying(outputs, results))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        output = self._one(outputs, "reduce_scatter")
        parts = [dense(part) for part in self._one(inputs, "reduce_scatter")]
        if any(part.shape != output.shape for part in parts):
            return self._reduce_uneven(output, parts, opts)
        return self._reduce_scatter([output], [torch.cat([part.reshape(1, -1) for part in parts])], opts,
                                    "reduce_scatter")

    def _reduce_uneven(self, output, parts, opts):
        whole = torch.cat([part.reshape(-1) for part in parts])
        counts = [part.numel() for part in parts]
        work = self._reduce([whole], [whole], opts, "reduce_scatter")
        return work.then(copying([output], lambda: [whole.split(counts)[self._rank]]), [output])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._reduce_scatter(outputs, [dense(tensor) for tensor in inputs], opts, "reduce_scatter_tensor")

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs, sources, opts, what):
        size, op = len(self._ranks), opts.reduceOp
        if self.options.relaxed and not self._warned:
            self._warned = True
            warnings.warn("pg_options of \"bagua\" apply to all_reduce only: reduce_scatter and all_gather, which FSDP "
                          "uses, move full precision", stacklevel=4)
        wholes = [rows_of(source, size) for source in sources]
        for whole, output in zip(wholes, outputs, strict=True):
            if whole.numel() != size * output.numel() or whole.dtype != output.dtype:
                raise ValueError(f"{what}: an input of {whole.numel()} elements of {whole.dtype} does not give {size} "
                                 f"ranks an output of {output.numel()} of {output.dtype}")
        native_op = core_op(sources, op)
        if native_op not in (native.OP_SUM, native.OP_AVERAGE):
            reduced = [torch.empty_like(whole) for whole in wholes]
            work = self._reduce(wholes, reduced, opts, what)
            return work.then(copying(outputs, lambda: [whole[self._rank] for whole in reduced]), outputs)
        name, what = self._begin(what)
        if self._places is not None:
            wholes = [whole[sorted(range(size), key=self._places.__getitem__)] for whole in wholes]
        results = [dense(output) for output in outputs]
        operation = self._post(
            native.REDUCESCATTER, name,
            [frontend.view(whole, result) for whole, result in
             zip(apart(wholes, results), results, strict=True)], opts,
            op=native_op, prescale_factor=prescale_of(op),
        )
        return self._work(operation, outputs, what, opts, copying(outputs, results))
