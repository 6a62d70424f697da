"""Operations of a group that only move tensors: broadcast, all forms of gather and scatter, all-to-all."""
from typing import Any

import torch

from bagua_hvd.collectives import rules
from bagua_hvd.core import native
from bagua_hvd.torch.distributed import tensors
from bagua_hvd.torch.distributed.other_devices import OtherDevices
from bagua_hvd.torch.distributed.tensors import Tensors, dense, row
from bagua_hvd.torch.distributed.works import Work
from bagua_hvd.torch.frontend import frontend


class Movements(OtherDevices):
    """broadcast, allgather, gather, scatter and alltoall, with the names and arguments of c10d."""

    def broadcast(self, given: Tensors, opts: Any) -> Work:
        name, what = self._begin("broadcast")
        sources = [dense(tensor) for tensor in given]
        flat = [tensors.movable(source) for source in sources]
        operation = self._post(native.BROADCAST, name, [frontend.view(t, t) for t in flat], opts,
                               root_rank=self._ranks[opts.rootRank])
        return self._work(operation, given, what, opts, tensors.copying(given, sources))

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
        sources = tensors.apart(sources, results)
        operation = self._post(native.ALLGATHER, name,
                               [frontend.view(row(s), r) for s, r in zip(sources, results, strict=True)], opts)
        return self._work(operation, outputs, what, opts, tensors.copying(
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
            tensors.copying(outputs, lambda: [part for rows in gathered for part in rows]), outputs)

    def _take_parts(self, operation, views, like, outputs, what, received):
        """Copies the core's result, the concatenated parts of the ranks, into `outputs`, a dict by rank.

        received: number of elements from each rank.
        """
        [whole] = rules.results(frontend, operation, views, [like])
        counts = {rank: tensors.movable(dense(outputs[rank])).numel() for rank in sorted(outputs, key=self._place)}
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
        return work.then(tensors.copying([output], [result]), [output])

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
        parts = [tensors.movable(dense(inputs.get(rank, nothing))) for rank in order]
        flat = torch.cat(parts) if flat is None or self._places is not None else tensors.movable(flat)
        views = [frontend.view(flat)]
        operation = self._post(native.ALLTOALL, name, views, splits=[part.numel() for part in parts])

        def finish():
            splits = operation.received_splits(0, len(order))
            self._take_parts(operation, views, flat, outputs, what, dict(zip(order, splits, strict=True)))

        return self._work(operation, list(outputs.values()), what, opts, finish)
