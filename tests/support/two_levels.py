"""Results of the two-level operations with several ranks on each host: each host sums or averages its members in the
dtype, in rank order; then the flat equation applies, with hosts as ranks; all members of a host have its results.
"""
import math
import os

import numpy as np

from floats import load, store, wide
from low_precision import allgather, chunks, scatter_gather

# For tests of few layouts: the host of each rank. Unequal hosts, ranks assigned round-robin, more than two hosts.
LAYOUTS = ["ABB", "ABAB", "AABBCC"]


def members_of(letters):
    """The ranks of each host, hosts ordered by their first ranks. letters: the host of each rank."""
    return [[rank for rank, host in enumerate(letters) if host == name] for name in dict.fromkeys(letters)]


def environments(letters, common=None):
    """For run_ranks: each rank's environment, on hosts simulated by host ids; `common` is for all."""
    hosts, boot = members_of(letters), os.urandom(4).hex()
    environments = {}
    for members in hosts:
        for local_rank, rank in enumerate(members):
            having = [others for others in hosts if len(others) > local_rank]
            environments[rank] = {
                "BAGUA_HVD_HOST_ID": f"{boot}.{letters[rank]}",
                "HOROVOD_LOCAL_RANK": str(local_rank), "HOROVOD_LOCAL_SIZE": str(len(members)),
                "HOROVOD_CROSS_RANK": str(having.index(members)), "HOROVOD_CROSS_SIZE": str(len(having)),
                **(common or {}),
            }
    return [environments[rank] for rank in range(len(letters))]


def scaled(dtype, stored, factor):
    return stored if factor == 1 else store(dtype, load(dtype, stored) * wide(dtype)(factor))


def within(dtype, inputs, members, prescale, postscale):
    """A host's sum, as the input of an allreduce."""
    total = scaled(dtype, inputs[members[0]], prescale)
    for rank in members[1:]:
        total = store(dtype, load(dtype, total) + load(dtype, scaled(dtype, inputs[rank], prescale)))
    return scaled(dtype, total, postscale)


def means(dtype, inputs, hosts):
    return [within(dtype, inputs, members, 1, 1 / len(members)) for members in hosts]


def of_host(hosts, results):
    """By rank, its host's result."""
    by_rank = {rank: result for members, result in zip(hosts, results, strict=True) for rank in members}
    return [by_rank[rank] for rank in range(len(by_rank))]


def shards(hosts, nbytes, itemsize):
    """As native/executor/group.h: slices of elements, and their owners, one rank of every host."""
    count = min(map(len, hosts))
    size = max(1024, math.ceil(math.ceil(nbytes / count) / 64) * 64)
    begins = [min(i * size, nbytes) // itemsize for i in range(count + 1)]
    owners = [[members[i] for members in hosts] for i in range(count)]
    return [(slice(begin, end), ranks) for begin, end, ranks in zip(begins, begins[1:], owners, strict=False)]


def c_lp_s(codec, dtype, inputs, hosts, seeds, average=True, prescale=1, postscale=1, by_allgather=False, errors=None):
    """Every rank's result, for several hosts with several ranks.

    errors: (workers', servers'), both of the bucket's length for each rank, updated in place.
    """
    ranks, count = len(inputs), len(inputs[0])
    weight, factor = (len(hosts) / ranks, postscale / len(hosts)) if average else (1, postscale)
    sums = [within(dtype, inputs, members, prescale, weight) for members in hosts]
    out = np.empty_like(inputs[0])
    for part, owners in shards(hosts, count * inputs[0].itemsize, inputs[0].itemsize):
        values, chosen = [x[part] for x in sums], [seeds[rank] for rank in owners]
        worker = [errors[0][rank][part] for rank in owners] if errors else None
        if by_allgather:
            out[part] = allgather(codec, dtype, values, chosen, factor, worker, offset=part.start)
            continue
        places = chunks(part.stop - part.start, len(owners))
        server = [errors[1][rank][part][begin:end]
                  for rank, (begin, end) in zip(owners, places, strict=True)] if errors else None
        out[part] = scatter_gather(codec, dtype, values, chosen, factor, worker, server, offset=part.start)
    return out
