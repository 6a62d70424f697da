"""The cost of communicating one bucket, in units that do not depend on network or processor."""
from typing import NamedTuple

from bagua_hvd.codecs import Codec
from bagua_hvd.core import native


class Ranks(NamedTuple):
    """How many ranks communicate, on how many hosts."""

    ranks: int
    hosts: int

    @property
    def ends(self) -> int:
        """The number of endpoints of links: hosts, or the ranks of a single host."""
        return self.hosts if self.hosts > 1 else self.ranks


class Cost(NamedTuple):
    """The cost of one bucket.

    Attributes:
        allreduced: bytes that are averaged as they are.
        sent: bytes of codes that are sent over one link. rounds: sequential rounds of messages with codes.
        encoded, decoded: elements that one rank encodes and decodes, by `codec`.
        kept: bytes of state that a rank keeps between steps.
    """

    allreduced: int = 0
    sent: int = 0
    rounds: int = 0
    encoded: int = 0
    decoded: int = 0
    codec: Codec | None = None
    kept: int = 0


def allreduced(elements: int, dtype: int) -> Cost:
    """The cost of c_fp_s()."""
    return Cost(allreduced=elements * native.dtype_size(dtype))


def coded(codec: Codec, elements: int, dtype: int, ranks: Ranks, hierarchical: bool,
          exchange: str = "scatter_gather", error_feedback: bool = False) -> Cost:
    """The cost of c_lp_s()."""
    n = ranks.ends if hierarchical else ranks.ranks
    code = codec.encoded_size(dtype, elements)
    local = ranks.ranks // ranks.ends
    beyond = n - 1 if hierarchical else ranks.ranks - local         # receivers over the link
    senders = 1 if hierarchical else local
    kept = (elements + elements // n) * native.dtype_size(dtype) if error_feedback else 0
    if exchange == "allgather":
        return Cost(sent=senders * beyond * code, rounds=1, encoded=elements, decoded=n * elements, codec=codec,
                    kept=kept)
    return Cost(sent=2 * senders * beyond * code // n, rounds=2, encoded=elements + elements // n,
                decoded=2 * elements, codec=codec, kept=kept)
