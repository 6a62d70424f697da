"""Gradients of the differentiable collectives, against the rules written beside each."""
import pytest
import torch

import bagua_hvd.torch as hvd


def weights(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def gradient_of(collective, leaf, weight):
    """d sum(weight * collective(leaf)) / d leaf."""
    leaf.grad = None
    (collective(leaf) * weight).sum().backward()
    return leaf.grad


def close(actual, expected):
    assert torch.allclose(actual, expected, atol=1e-5), (actual, expected)


def gradients():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    leaf = torch.ones(n, 3, requires_grad=True)
    w = [weights(r, n, 3) for r in range(n)]
    mean, total = sum(w) / n, sum(w)

    # allreduce: the same op and factors, applied to the gradients.
    close(gradient_of(hvd.allreduce, leaf, w[rank]), mean)
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
    close(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum, **factors), leaf, w[rank]), 0.5 * total)
    close(gradient_of(lambda x: hvd.grouped_allreduce([x, 2 * x])[1], leaf, w[rank]), 2 * mean)
    reduced = hvd.allreduce(leaf, compression=hvd.Compression.fp16)
    assert reduced.dtype == torch.float32 and reduced.requires_grad
    # A gradient that is an expanded scalar is not contiguous.
    leaf.grad = None
    hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
    close(leaf.grad, torch.full((n, 3), float(n)))

    # allgather: the averaged gradient, this rank's rows. First dimensions differ.
    rows = [r + 1 for r in range(n)]
    start = sum(rows[:rank])
    own = torch.ones(rows[rank], 3, requires_grad=True)
    w2 = [weights(r, sum(rows), 3) for r in range(n)]
    expected = (sum(w2) / n)[start:start + rows[rank]]
    close(gradient_of(hvd.allgather, own, w2[rank]), expected)
    close(gradient_of(lambda x: hvd.grouped_allgather([2 * x, x])[0], own, w2[rank]), 2 * expected)

    # broadcast: the averaged gradient on the root, zero elsewhere.
    root = n - 1
    close(gradient_of(lambda x: hvd.broadcast(x, root), leaf, w[rank]), mean if rank == root else torch.zeros(n, 3))

    # alltoall: each row's gradient comes from the rank that got the row; dropped rows have none.
    sent = torch.ones(n + 1, 3, requires_grad=True)
    expected = torch.cat([*(w[r][rank:rank + 1] for r in range(n)), torch.zeros(1, 3)])
    close(gradient_of(lambda x: hvd.alltoall(x, splits=[1] * n)[0], sent, w[rank]), expected)
    close(gradient_of(hvd.alltoall, leaf, w[rank]), expected[:n])

    # reducescatter: the gathered gradient, times n for Sum, times the factors.
    w3 = [weights(r, 1, 3) for r in range(n)]
    close(gradient_of(hvd.reducescatter, leaf, w3[rank]), torch.cat(w3))
    close(gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0), leaf, w3[rank]),
          2 * n * torch.cat(w3))
    close(gradient_of(lambda x: hvd.grouped_reducescatter([x])[0], leaf, w3[rank]), torch.cat(w3))

    # Members without gradients in the group, and complex numbers, also conjugated.
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64):
        x = leaf.detach().clone().requires_grad_()
        gathered, mask = hvd.grouped_allgather([x, torch.ones(2).to(dtype)])
        assert mask.dtype == dtype and not mask.requires_grad
        gathered.sum().backward()
        close(x.grad, torch.ones_like(x))
    for call, expected in ((hvd.allgather, 1 + 2j), (lambda x: hvd.grouped_allgather([x])[0], 1 + 2j),
                           (hvd.alltoall, 1 + 2j), (lambda x: hvd.broadcast(x, 0), (1 + 2j) * (rank == 0))):
        z = torch.ones(n, dtype=torch.complex64, requires_grad=True)
        (call(z).conj() * (1 + 2j)).real.sum().backward()
        close(z.grad, torch.full_like(z, expected))
    imaginary = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag        # -1 with the negative bit
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x).backward(imaginary)
    close(x.grad, -torch.ones(3))

    # In place: autograd refuses values that were overwritten after it had kept them, and only those.
    for call in (hvd.allreduce_, lambda x: hvd.synchronize(hvd.allreduce_async_(x)), lambda x: hvd.broadcast_(x, 0),
                 lambda x: hvd.synchronize(hvd.broadcast_async_(x, 0)), lambda x: hvd.grouped_allreduce_([x]),
                 lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x])),
                 lambda x: hvd.broadcast_parameters([x], 0)):
        w = torch.ones(2, requires_grad=True)
        kept = w * 3
        squared, added = (kept * kept).sum(), (kept + 1).sum()
        call(kept.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.backward(retain_graph=True)
        w.grad = None
        added.backward()
        close(w.grad, torch.full((2,), 3.0))
        call(w.detach())
        (w * w).sum().backward()        # a leaf may be overwritten between passes
        with torch.inference_mode():
            call(torch.ones(2))

    # No graph without requires_grad; asynchronous forms have none.
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(leaf)).requires_grad
    # Second derivatives work, too.
    x = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x ** 3, op=hvd.Sum).sum(), x, create_graph=True)
    close(first, torch.tensor([n * 12.0]))
    first.sum().backward()
    close(x.grad, torch.tensor([n * 12.0]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients(run_ranks, n):
    run_ranks(n, gradients)
