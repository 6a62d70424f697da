"""Errors: the exception and where it is raised, and that the job continues (or ends on all ranks within seconds)."""
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.core import operations
from bagua_hvd.core.operations import WAIT_SLICE_MS
from bagua_hvd.job import basics
from memory import resident_nbytes

RESULT_BYTES = 32 << 20


def assert_usable():
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def mistakes_of_one_rank():
    with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init()"):
        hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match="Horovod has not been initialized"):
        hvd.allreduce(torch.ones(1))
    hvd.init()
    n = hvd.size()
    one = torch.ones(2, 3)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.bool, torch.complex64):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.reducescatter,
                     lambda tensor: hvd.grouped_allreduce([torch.ones(1), tensor])):
            with pytest.raises(ValueError, match="Tensor type torch.* is not supported"):
                call(torch.ones(2).to(dtype))
    with pytest.raises(ValueError, match="is not supported"):
        hvd.broadcast(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), 0)
    with pytest.raises(ValueError, match=r"is not supported. Use hvd.sparse_allreduce_async\(\), or .to_dense"):
        hvd.allreduce(one.to_sparse())
    for call in (hvd.allreduce, hvd.allreduce_async_, hvd.allgather, hvd.alltoall, hvd.reducescatter,
                 lambda tensor: hvd.broadcast_(tensor, 0)):
        with pytest.raises(ValueError, match="contiguous"):
            call(one.t())
        with pytest.raises(ValueError, match="resolve_neg"):
            call(torch.imag(torch.ones(1, dtype=torch.complex64).conj()))      # 0 - 0 with the negative bit
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(one, average=True, op=hvd.Sum)
    for call in (hvd.allreduce, hvd.allreduce_async):
        with pytest.warns(DeprecationWarning) as told:
            call(one, average=False)
        assert [warning.filename for warning in told] == [__file__]         # by default Python shows only such warnings
        for second, remedy in ((hvd.Sum, "write op=hvd.Sum"), ("loss", "write name='loss'")):
            with pytest.raises(ValueError, match=remedy):
                call(one, second)
    with pytest.raises(TypeError, match="allreduce_async.. takes a number as `prescale_factor`, not '2'"):
        hvd.allreduce_async(one, prescale_factor="2")
    with pytest.raises(ValueError, match=r"'a.x00b' cannot name an operation: it has a NUL character"):
        hvd.allreduce(one, name="a\0b")
    with pytest.raises(TypeError, match=r"broadcast\(\) takes an int as `root_rank`, not 0.0"):
        hvd.broadcast(one, 0.0)
    everyone = hvd.global_process_set
    for call in (lambda: hvd.reducescatter(one, hvd.Sum), lambda: hvd.allgather(one, everyone),
                 lambda: hvd.grouped_allreduce([one], name=everyone), lambda: hvd.broadcast_(one, 0, everyone),
                 lambda: hvd.alltoall(one, None, everyone), lambda: hvd.allreduce(one, name=0),
                 lambda: hvd.broadcast_object(1, 0, everyone), lambda: hvd.allgather_object(1, everyone)):
        with pytest.raises(TypeError, match=r"\(\) takes a str as `name`, not .*, such as process_set= and op="):
            call()
    with pytest.raises(TypeError, match="join.. takes no process set"):
        hvd.join(everyone)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nam'"):
        hvd.allreduce(one, nam="loss")
    for wrong in ("fp16", hvd.Compression):
        with pytest.raises(ValueError, match="expected one of hvd.Compression, such as hvd.Compression.fp16"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(one)], 0.1), compression=wrong)
    for wrong in (torch.nn.Linear(1, 1), torch.optim.SGD, None):
        with pytest.raises(ValueError, match="expected an optimizer such as torch.optim.SGD"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(ValueError):
        hvd.allreduce(one, op=17)
    with pytest.raises(ValueError):
        hvd.grouped_allreduce([])
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(TypeError, match=r"takes a sequence of torch.Tensor as `tensors`, not dict"):
            grouped({one: one})
    for splits in ([1] * (n + 1), [3] * n, [-1] + [1] * (n - 1), [], torch.ones(n, dtype=torch.int64),
                   torch.ones(n, 1, dtype=torch.int32), torch.ones(n), [0.5] * n, 5):
        with pytest.raises(ValueError):
            hvd.alltoall(one, splits=splits)
    if n > 1:
        with pytest.raises(ValueError):
            hvd.alltoall(torch.ones(n + 1))
    with pytest.raises(ValueError):
        hvd.reducescatter(torch.tensor(1.0))
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(hvd.HorovodInternalError, match="Reducescatter currently only supports AVERAGE and SUM"):
            hvd.reducescatter(one, op=op)
    for root in (n, -1):
        with pytest.raises(ValueError, match="root rank"):
            hvd.broadcast(one, root)
    with pytest.raises(ValueError):
        hvd.allreduce(one, process_set=hvd.ProcessSet([0]))
    assert_usable()
    # A name that is in flight twice on this rank is an immediate error of the async call.
    hvd.barrier()
    if hvd.rank() == 0 and n > 1:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(ValueError, match="same name as another tensor that is currently being processed"):
            hvd.allreduce_async(torch.ones(2), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.allreduce(torch.ones(2), name="twice").tolist() == [1, 1]    # free again


def disagreements():
    """synchronize() raises HorovodInternalError with the same message on all ranks; the job continues."""
    hvd.init()
    first = hvd.rank() == 0
    one = torch.ones(17, 17)

    def disagree(fragment, post):
        handle = post()             # never raises
        with pytest.raises(hvd.HorovodInternalError, match=fragment) as caught:
            hvd.synchronize(handle)
        with pytest.raises(ValueError, match="was not created"):
            hvd.poll(handle)
        sentences = hvd.allgather_object(str(caught.value))
        assert len(set(sentences)) == 1, sentences
        assert_usable()

    disagree("Mismatched data types: One rank had type .*, but another rank had type .*",
             lambda: hvd.allreduce_async(one.int() if first else one, name="d"))
    disagree("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape .*17.*, but another rank sent a "
             "tensor of shape", lambda: hvd.allreduce_async(one if first else one[:5], name="s"))
    disagree("Mismatched ALLREDUCE tensor shapes",
             lambda: hvd.allreduce_async(one if first else one.reshape(-1), name="s"))
    disagree("Mismatched BROADCAST tensor shapes", lambda: hvd.broadcast_async(one if first else one[:5], 0, name="s"))
    disagree("Mismatched REDUCESCATTER tensor shapes",
             lambda: hvd.reducescatter_async(one if first else one[:5], name="s"))
    disagree("Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank .*, but another",
             lambda: hvd.allgather_async(one if first else one[0], name="s"))
    disagree("Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to .*, but another",
             lambda: hvd.allgather_async(one if first else one[:, :3].contiguous(), name="s"))
    disagree("Mismatched ALLTOALL tensor shapes: One rank sent a tensor with dimension 1 equal to .*, but another",
             lambda: hvd.alltoall_async(one if first else one[:, :3].contiguous(), [1] * hvd.size(), name="s"))
    disagree(r"Mismatched prescale and/or postscale factors: One rank sent factors \(.*\), but another rank sent",
             lambda: hvd.allreduce_async(one, name="f", prescale_factor=0.5 if first else 1.0))
    disagree("Mismatched reduction operation: One rank sent reduction op ., but another rank sent reduction op .",
             lambda: hvd.allreduce_async(one, name="o", op=hvd.Sum if first else hvd.Max))
    disagree("Mismatched BROADCAST root ranks: One rank specified root rank ., but another rank specified root rank .",
             lambda: hvd.broadcast_async(one, 0 if first else 1, name="r"))
    # A group fails as a whole, whichever tensor differs.
    for member in range(3):
        group = [torch.ones(3 if i == member and first else 2) for i in range(3)]
        disagree("Mismatched ALLREDUCE tensor shapes", lambda group=group: hvd.grouped_allreduce_async(group, name="g"))
    # Blocking calls raise the same error.
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(one if first else one[:5], name="b")
    for call in (hvd.allgather, hvd.alltoall):
        with pytest.raises((hvd.HorovodInternalError, ValueError)):
            call(torch.tensor(1.0))
    assert_usable()


def wait_for(*paths):
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def a_rank_dies(folder):
    hvd.init()
    assert_usable()
    ready = [Path(folder, str(rank)) for rank in range(hvd.size())]
    ready[hvd.rank()].touch()
    if hvd.rank() == hvd.size() - 1:
        wait_for(*ready)    # after the last operation of the other ranks, which would otherwise fail
        os._exit(0)
    # The end of its process is detected, long before the timeout of half a minute.
    lost = f"rank {hvd.size() - 1} was lost: its process ended"
    with pytest.raises(hvd.HorovodInternalError, match=lost):
        hvd.allreduce(torch.ones(2), name="never")
    with pytest.raises(hvd.HorovodInternalError, match=lost):
        hvd.allgather(torch.ones(2))
    hvd.shutdown()


def a_rank_shuts_down():
    hvd.init()
    assert_usable()
    if hvd.rank() == 0:
        time.sleep(0.3)
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2), name="never")
        hvd.shutdown()
    # The job may start again.
    hvd.init()
    assert_usable()


def interrupted(folder):
    hvd.init()
    assert_usable()
    heard = Path(folder, "heard")
    if hvd.rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            hvd.allreduce_(torch.ones(1000), name="waited", op=hvd.Sum)
        assert len(basics.context().abandoned) == 1     # the core still owns its memory
        heard.touch()
        handle = hvd.allreduce_async(torch.ones(2), name="again", op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    else:
        wait_for(heard)
        hvd.allreduce_(torch.ones(1000), name="waited", op=hvd.Sum)
        hvd.allreduce(torch.ones(2), name="again", op=hvd.Sum)
    hvd.barrier()
    assert not basics.context().abandoned


def interrupted_while_posting():
    """A signal handler raises when the core already has the operation, or before its Python object exists."""

    class Core:
        def __getattr__(self, name):
            function = getattr(native_lib, name)
            return interrupt_after(function) if name.startswith("bhvd_post") else function

    class NoOperation(operations.Operation):
        def __init__(self, *args):
            raise KeyboardInterrupt

    def interrupt_after(function):
        def call(*args):
            function(*args)
            raise KeyboardInterrupt
        return call

    hvd.init()
    assert_usable()
    native_lib = operations.lib
    posts = {"one": lambda: hvd.allreduce_async(torch.ones(1000), name="one", op=hvd.Sum),
             "group": lambda: hvd.grouped_allreduce_async([torch.ones(1000)] * 2, name="group", op=hvd.Sum)}
    for name, post in posts.items():
        if hvd.rank() == 0:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(operations, "lib", Core())
                post()
            assert len(basics.context().abandoned) == 1, name
        else:
            hvd.synchronize(post())
        hvd.barrier()
        assert_usable()
        assert not basics.context().abandoned
    if hvd.rank() == 0:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(operations, "Operation", NoOperation)
            posts["one"]()
        assert len(basics.context().abandoned) == 1
    else:
        hvd.synchronize(posts["one"]())
    hvd.barrier()
    assert_usable()


def interrupted_as_it_ends():
    """A signal arrives, and before Python handles it, the operation completes: its result is unused."""

    def ring(*_):
        raise TimeoutError

    def gather():
        return hvd.allgather(torch.ones(RESULT_BYTES // 4 // hvd.size()))

    hvd.init()
    assert_usable()
    signal.signal(signal.SIGALRM, ring)
    for times in range(8):
        hvd.barrier()
        if times == 2:
            before = resident_nbytes()
        if hvd.rank() == 0:
            posted = repr(basics.runtime.unnamed[0])
            try:
                signal.setitimer(signal.ITIMER_REAL, WAIT_SLICE_MS / 3000)
                gather()
            except TimeoutError:
                if repr(basics.runtime.unnamed[0]) == posted:
                    gather()        # the other rank waits for it
        else:
            time.sleep(WAIT_SLICE_MS / 2000)
            gather()
    hvd.barrier()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert_usable()
    assert resident_nbytes() < before + 2 * RESULT_BYTES


def many_lives():
    for _life in range(10):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert hvd.allreduce_async(torch.ones(1)) == 1
        assert_usable()
        hvd.barrier()
        # An immediate shutdown: agreed operations still succeed on slower ranks.
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError):
            hvd.size()


def forked_child():
    hvd.init()
    assert_usable()
    child = os.fork()
    if child == 0:
        try:
            assert hvd.rank() >= 0 and hvd.size() == 2
            with pytest.raises(hvd.HorovodInternalError):
                hvd.allreduce(torch.ones(2))
            hvd.shutdown()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_usable()


@pytest.mark.parametrize("n", [1, 3])
def test_mistakes_of_one_rank(run_ranks, n):
    run_ranks(n, mistakes_of_one_rank)


@pytest.mark.parametrize("n", [2, 3])
def test_disagreements(run_ranks, n):
    run_ranks(n, disagreements)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_dies(run_ranks, tmp_path, transport):
    run_ranks(3, a_rank_dies, arguments={"folder": str(tmp_path)}, env={"BAGUA_HVD_TRANSPORT": transport})


def test_a_rank_shuts_down(run_ranks):
    run_ranks(2, a_rank_shuts_down)


def test_interrupted(run_ranks, tmp_path):
    run_ranks(2, interrupted, arguments={"folder": str(tmp_path)})


def test_interrupted_while_posting(run_ranks):
    run_ranks(2, interrupted_while_posting)


def test_interrupted_as_it_ends(run_ranks):
    run_ranks(2, interrupted_as_it_ends)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_many_lives(run_ranks, n, transport):
    run_ranks(n, many_lives, env={"BAGUA_HVD_TRANSPORT": transport})


def test_forked_child(run_ranks):
    run_ranks(2, forked_child)


def init_without_rendezvous():
    with pytest.raises(ValueError, match="baguarun"):
        hvd.init()
    assert not hvd.is_initialized()


def init_alone():
    with pytest.raises(ValueError, match="Horovod initialization failed.* within 1 s"):
        hvd.init()
    assert not hvd.is_initialized()


def test_init_fails(run_ranks):
    run_ranks(1, init_without_rendezvous, env={"HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": ""})
    # Both ranks expect three ranks.
    run_ranks(2, init_alone, env={"HOROVOD_SIZE": "3", "HOROVOD_START_TIMEOUT": "1"})
