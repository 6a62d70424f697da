"""Operations of a group that reduce. If the core lacks a reduction, tensors are gathered and reduced here."""
import warnings
from typing import Any

import torch
import torch.distributed as dist

from bagua_hvd.core import native
from bagua_hvd.torch.distributed import sparse, tensors
from bagua_hvd.torch.distributed.movements import Movements
from bagua_hvd.torch.distributed.tensors import Tensors, dense, reduce_rows, rows_of
from bagua_hvd.torch.distributed.works import Work
from bagua_hvd.torch.frontend import frontend


class Reductions(Movements):
    """allreduce, reduce and reduce_scatter, with the names and arguments of c10d."""

    _warned = False     # whether it has warned that pg_options do not apply

    def allreduce(self, given: Tensors, opts: Any = None) -> Work:
        opts = dist.AllreduceOptions() if opts is None else opts
        tensor = self._one(given, "allreduce")
        if tensor.is_sparse:
            return sparse.allreduce(self, tensor, opts)
        return self._reduce(given, given, opts, "all_reduce")

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
        native_op = tensors.native_op(sources, op)
        if native_op is None:
            gathered = [source.new_empty((len(self._ranks), *source.shape)) for source in sources]
            return self._gather_rows(gathered, sources, opts, what).then(
                tensors.copying(outputs, lambda: [reduce_rows(rows, op) for rows in gathered]), outputs)
        may_relax = self.options.relaxed and what.startswith("all_reduce")
        name, what = self._begin(what)
        results = sources if outputs is inputs else outputs
        operation = None
        if may_relax and len(sources) == 1 and native_op in (native.OP_SUM, native.OP_AVERAGE):
            relaxed = self.options.communicate(sources[0], name, self._number, self._set,
                                               native_op == native.OP_AVERAGE, tensors.prescale_of(op))
            operation = None if relaxed is None else self._waiter(relaxed, sources[0])
        if operation is None:
            operation = self._post(
                native.ALLREDUCE, name, [frontend.view(s, r) for s, r in zip(sources, results, strict=True)], opts,
                op=native_op, prescale_factor=tensors.prescale_of(op),
            )
        return self._work(operation, outputs, what, opts, tensors.copying(outputs, results))

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
        return work.then(tensors.copying([output], lambda: [whole.split(counts)[self._rank]]), [output])

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
        native_op = tensors.native_op(sources, op)
        if native_op not in (native.OP_SUM, native.OP_AVERAGE):
            reduced = [torch.empty_like(whole) for whole in wholes]
            work = self._reduce(wholes, reduced, opts, what)
            return work.then(tensors.copying(outputs, lambda: [whole[self._rank] for whole in reduced]), outputs)
        name, what = self._begin(what)
        if self._places is not None:
            wholes = [whole[sorted(range(size), key=self._places.__getitem__)] for whole in wholes]
        results = [dense(output) for output in outputs]
        operation = self._post(
            native.REDUCESCATTER, name,
            [frontend.view(whole, result) for whole, result in
             zip(tensors.apart(wholes, results), results, strict=True)], opts,
            op=native_op, prescale_factor=tensors.prescale_of(op),
        )
        return self._work(operation, outputs, what, opts, tensors.copying(outputs, results))
