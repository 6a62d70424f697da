"""Writes the initial inputs of the corpora: messages as ranks send them. Inputs found by fuzzing are in the same
folders.

    python tests/fuzz/seeds.py
"""
import itertools
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, BARRIER, JOIN, C_LP_S, ADD = 0, 1, 2, 3, 5, 6, 7, 10
RESPONSE, MISS, GOODBYE, UP, DOWN, CLOSING = 2, 3, 4, 7, 8, 11
TREE, MEMBER, LAST = 8, 1, 16           # bits of role
LEFT = b"\2"
NOBODY = 2**32 - 1
FLOAT32 = 7


def request(kind, name, shape=(6,), process_set=1, splits=(), codec=1, op=1, dtype=FLOAT32):
    """A request as in native/core/message/request.h. shape None: no tensor."""
    tensors = b"" if shape is None else struct.pack(f"<BB{len(shape)}q", dtype, len(shape), *shape)
    return struct.pack("<IH", process_set, len(name)) + name + struct.pack(
        "<BBBdBBqBBqddI", kind, op, codec, 0, 0, 0, 0, 0, 0, 0, 1, 1, int(shape is not None)
    ) + tensors + struct.pack(f"<I{len(splits)}q", len(splits), *splits)


def asked(*requests):
    """A group's items in an UP: requests in full, or id ranges (id, count)."""
    return b"".join(struct.pack("<BII", 0, *item) if isinstance(item, tuple)
                    else struct.pack("<BI", 1, len(item)) + item for item in requests)


def answer_head(process_set, count):
    """As core/negotiation/responses.c: number, window, alpha, beta, process set, count."""
    return struct.pack("<qBIIII", 1, 1, 0, 0, process_set, count)


def answered(*items, process_set=1, count=None):
    """A RESPONSE. items: (name, id, agreed, request) or an id range (id, count)."""
    body = b""
    for item in items:
        if len(item) == 2:
            body += struct.pack("<BII", 0, *item)
            continue
        name, number, agreed, about = item
        body += struct.pack("<BH", 1, len(name)) + name + struct.pack(
            f"<IBI{len(agreed)}qI", number, 0, len(agreed), *agreed, len(about)) + about
    return answer_head(process_set, len(items) if count is None else count) + body


def reason(status=5, cause=1, rank=2):
    """As native/core/message/frame.h, after its status."""
    return struct.pack("<BBIH", status, cause, rank, 3) + b"why"


def error(name, process_set=1, status=3, cause=0):
    return (answer_head(process_set, 1) + struct.pack("<BH", 1, len(name)) + name + struct.pack("<I", 0)
            + reason(status, cause, NOBODY))


def rank_set(ranks):
    """As native/core/message/rank_set.h. Consecutive ranks are given one by one, which makes it malformed."""
    return struct.pack("<I", len(ranks)) + b"".join(struct.pack("<II", rank, 1) for rank in ranks)


def bundled(*groups):
    """An UP. groups: (ranks, items)."""
    return b"".join(rank_set(ranks) + struct.pack("<I", len(items)) + items for ranks, items in groups)


def passed_on(*items):
    """A DOWN. items: (ranks, frame type, payload); no ranks: all."""
    return b"".join(rank_set(ranks) + struct.pack("<BI", kind, len(payload)) + payload
                    for ranks, kind, payload in items)


def frames(role, posts, *sent):
    """A target_negotiation input: frames of (peer, type, payload)."""
    return bytes([role, posts, 0]) + b"".join(
        struct.pack("<BBH", peer, kind, len(payload)) + payload for peer, kind, payload in sent)


def stream(role, posts, cut, *sent):
    return bytes([role | 2, posts, cut]) + b"".join(
        struct.pack("<IB", len(payload), kind) + payload for kind, payload in sent)


def said(peer, items):
    """A child's request frame for rank 0."""
    return peer, UP, bundled(([peer], items))


def told(kind, payload):
    """A frame from rank 0 to all."""
    return 0, DOWN, passed_on(([], kind, payload))


def negotiation():
    allreduce, join = request(ALLREDUCE, b"a"), request(JOIN, b"join", None)
    both = [said(1, asked(allreduce)), said(2, asked(allreduce))]
    yield frames(0, 1, *both)
    yield frames(0, 1, *both, said(1, asked((1, 1))), said(2, asked((1, 2))))
    yield frames(0, 1, said(1, asked(join)), said(2, asked(allreduce)), (2, GOODBYE, b""))
    yield frames(0, 16, said(1, asked(join)), said(2, asked(join)))
    yield frames(0, 2, said(1, asked(request(ALLGATHER, b"g", (3, 2), 2))))
    yield frames(0, 4, *[said(peer, asked(request(ALLTOALL, b"t"))) for peer in (1, 2)])
    yield frames(0, 4, *[said(peer, asked(request(ALLTOALL, b"t", splits=(1, 2, 3)))) for peer in (1, 2)])
    yield frames(0, 128, *[said(peer, asked(request(ADD, b"p", None, splits=(1, 2)))) for peer in (1, 2)])
    yield frames(0, 1, said(1, asked(request(ALLREDUCE, b"a", (7,)))), said(2, asked(allreduce)))
    yield frames(0, 0, said(1, asked((7, 65536))))
    yield frames(0, 16, said(1, asked(request(JOIN, b"join", None, 2))))
    yield frames(0, 0, said(1, asked(request(ADD, b"p", None, 2, splits=(1, 2)))))
    yield frames(1, 1, told(RESPONSE, answered((b"a", 1, (), b""), count=2**31)))
    yield frames(0, 1, *both, (0, 0, b""), said(1, asked((1, 1))), said(2, asked((1, 1))))
    yield frames(1, 1, told(RESPONSE, answered((b"a", 1, (), b""))), (1, 0, b""), told(MISS, struct.pack("<I", 1)))
    yield stream(0, 1, 4, said(1, asked(allreduce))[1:], (GOODBYE, reason()))
    yield frames(1, 1, told(RESPONSE, answered((b"a", 1, (), b""))))
    yield frames(1, 9, told(RESPONSE, answered((b"a", 1, (), b""))), told(MISS, struct.pack("<I", 1)))
    yield frames(1, 2, told(RESPONSE, answered((b"g", 1, (3, 3), b""), process_set=2)))
    yield frames(1, 4, told(RESPONSE, answered((b"t", 1, (2,) * 4, b""))))
    yield frames(1, 16, told(RESPONSE, answered((b"join", 0, (2,), b""))))
    yield frames(1, 16, told(RESPONSE, answered((b"z", 0, (), request(ALLREDUCE, b"z")))))
    yield frames(1, 16, told(RESPONSE, answered((b"z", 0, (), request(C_LP_S, b"z")))))
    yield frames(1, 1, told(RESPONSE, error(b"a")), (0, GOODBYE, b""))
    yield frames(1, 1, told(RESPONSE, answered((b"a", 1, (), b""), (1, 2), count=3)))
    yield stream(1, 255, 30, told(RESPONSE, answered((b"a", 1, (), b"")))[1:], told(RESPONSE, error(b"b"))[1:])


def relayed():
    """A chain 0 - 1 - 2: rank 0 receives rank 2's frames through rank 1, or rank 1 relays."""
    allreduce = asked(request(ALLREDUCE, b"a"))
    agreed = answered((b"a", 1, (), b""))
    turn, leave = (1, 0, b""), (1, 1, b"")
    to_all = passed_on(([], RESPONSE, agreed))
    member = TREE | MEMBER
    both = [(1, UP, bundled(([1], allreduce), ([2], allreduce)))]
    yield frames(TREE, 1, *both, (1, UP, bundled(([1], asked((1, 1))), ([2], asked((1, 2))))))
    yield frames(TREE, 1, *both, (1, UP, bundled(([2], LEFT))), (2, UP, bundled(([2], asked((1, 1))))))
    yield frames(TREE, 0, (1, UP, bundled(([2], LEFT), ([2], LEFT))))
    yield frames(TREE, 0, (1, UP, bundled(([1], LEFT))))
    yield frames(TREE, 0, (2, UP, bundled(([2], allreduce))))
    yield frames(TREE, 1, (1, UP, struct.pack("<III", 1, 1, 2) + struct.pack("<I", len(allreduce)) + allreduce))
    yield frames(TREE, 1, (1, RESPONSE, agreed))
    yield frames(member, 1, (2, UP, bundled(([2], asked((5, 9), (7, 1)) + allreduce))), (0, DOWN, to_all))
    yield frames(member, 1, (0, DOWN, to_all), turn, (2, UP, bundled(([2], asked((1, 1))))),
                 (0, DOWN, passed_on(([1], MISS, struct.pack("<I", 1)), ([2], MISS, struct.pack("<I", 1)))))
    yield frames(member, 1, leave, (2, UP, bundled(([2], LEFT))), (0, DOWN, passed_on(([], RESPONSE, agreed))),
                 (2, GOODBYE, b""))
    yield frames(member, 1, (0, DOWN, passed_on(([0], RESPONSE, agreed))))
    yield frames(member, 1, (0, CLOSING, b""))
    yield frames(member, 1, (2, DOWN, passed_on(([], RESPONSE, agreed))))
    yield frames(member, 1, (2, GOODBYE, b""), (0, DOWN, to_all), (0, GOODBYE, b""))
    last = TREE | LAST
    yield frames(last, 1, (0, GOODBYE, b""), (1, DOWN, to_all), (1, CLOSING, b""))
    yield frames(last, 1, (0, GOODBYE, reason(6, 3, 0)), (1, GOODBYE, b""))
    yield frames(last, 1, (1, GOODBYE, b""))
    yield frames(last, 1, (1, CLOSING, reason(0)))
    yield stream(member, 1, 9, (DOWN, passed_on(([], RESPONSE, agreed))), (GOODBYE, reason(6, 3, 0)))
    yield stream(TREE, 1, 7, (UP, bundled(([1], allreduce), ([2], allreduce))))


def inline():
    """Inline payloads: known ids, too many bytes, an unknown id, each also with a relay."""
    allreduce = asked(request(ALLREDUCE, b"a"))
    agreed, turn = answered((b"a", 1, (), b"")), (1, 0, b"")
    values = struct.pack("<6f", *range(6))

    def item(number, data=values):
        return struct.pack("<BIH", 3, number, len(data)) + data

    def summed(*items):
        return answer_head(1, len(items)) + b"".join(items)

    both = [said(1, allreduce), said(2, allreduce), (0, 0, b"")]
    for sent in ([item(1), item(1)], [item(1), asked((1, 1))], [item(1), item(1, values * 2)], [item(1) * 2, item(2)]):
        yield frames(0, 1, *both, *[said(peer + 1, items) for peer, items in enumerate(sent)])
    yield frames(1, 1, told(RESPONSE, agreed), turn, told(RESPONSE, summed(item(1))))
    yield frames(1, 1, told(RESPONSE, agreed), turn, told(RESPONSE, summed(item(1, values[4:]), item(1))))
    yield frames(TREE | MEMBER, 1, (0, DOWN, passed_on(([], RESPONSE, agreed))), turn, (2, UP, bundled(([2], item(1)))))


def findings():
    """By name: messages of a broken coordinator that once made a rank read freed memory, or call a failure success."""
    agreed = answered((b"a", 1, (), b""))
    once = told(RESPONSE, agreed), (1, 0, b"")        # completed; then requested again by its id
    yield "answered-twice", frames(1, 1, told(RESPONSE, answered((b"a", 1, (), b""), (b"a", 1, (), b""))))
    yield "answered-again", frames(1, 1, told(RESPONSE, agreed), told(RESPONSE, agreed))
    yield "cached-twice", frames(1, 1, *once, told(RESPONSE, answered((1, 1), (1, 1))))
    yield "stale-after-answer", frames(
        1, 2, told(RESPONSE, answered((b"g", 1, (3, 3), b""), process_set=2)), (1, 0, b""),
        told(RESPONSE, answered((1, 1), process_set=2)), told(MISS, struct.pack("<I", 1)))
    yield "refused-after-answer", frames(1, 1, told(RESPONSE, agreed), told(RESPONSE, error(b"a")))
    yield "answered-before-asked", frames(1 | 4, 1, told(RESPONSE, agreed))
    yield "refused-before-asked", frames(1 | 4, 1, told(RESPONSE, error(b"a")))
    yield "refused-with-success", frames(1, 1, told(RESPONSE, error(b"a", status=1)))
    yield "goodbye-without-reason", frames(1, 1, (0, GOODBYE, reason(0)))
    yield "goodbye-blames-no-rank-of-the-job", frames(1, 1, (0, GOODBYE, reason(5, 1, 3)))
    yield "goodbye-of-no-cause", frames(1, 1, (0, GOODBYE, reason(5, 7)))
    yield "refusal-blames-nobody", frames(1, 1, told(RESPONSE, error(b"a", cause=1)))
    yield "fused-what-is-not", frames(1, 65, told(RESPONSE, answered((b"a", 1, (), b""), (b"r", 2, (), b""))))
    yield "gathered-of-another-size", frames(1, 2, told(RESPONSE, answered((b"g", 1, (3, 4), b""), process_set=2)))
    yield "gathered-too-much", frames(1, 2, told(RESPONSE, answered((b"g", 1, (2**62, 3), b""), process_set=2)))
    most = 2**31 - 1
    yield "exchanged-too-much", frames(1, 4, told(RESPONSE, answered((b"t", 1, (most, 2, most, most), b""))))
    yield "zeros-of-no-codec", frames(
        1, 16, told(RESPONSE, answered((b"z", 0, (), request(C_LP_S, b"z", dtype=4, codec=0)))))


def requests():
    for one, other in itertools.product(
            [request(ALLREDUCE, b"a"), request(BROADCAST, b"b", (2, 3)), request(BARRIER, b"r", None)],
            [request(ALLREDUCE, b"a", (7,)), request(ALLTOALL, b"t", splits=(1, 2, 3))]):
        yield struct.pack("<H", len(one)) + one + other


def codecs():
    for codec, dtype, features in itertools.product(range(1, 21), (6, 7, 8, 10), (0, 3)):
        yield struct.pack("<BBBBH", codec, dtype, features, 20, 100) + bytes(16) + b"\1" + bytes(15) + bytes(range(256))


def posts():
    """Operations of every kind: plain, with differing arguments, on a device, with states, and hostile."""
    for bits, kind in itertools.product((0, 1, 2, 4, 8, 9, 12), range(12)):
        yield bytes([bits, kind, 1, 1, 0]) + bytes([2, 7, 3, 2, 7, 3]) * 8


def hostile(kind, tensors=0, field=None, splits=b"\0"):
    """A target_post input: one operation with one hostile number, in the binary form that fill() there reads."""
    numbers = (bytes([1, *field]) if field else b"\0") + b"\0\0"
    return bytes([8, kind, 1, 1]) + (bytes([tensors - 1]) if tensors else b"") + numbers + b"\1\7\3" * tensors + splits


def refused():
    """By name: arguments that once crashed a rank or ended the job, and must be rejected."""
    root, codec, topology, lowest, more_than_a_byte = 3, 4, 6, 135, 132     # fields, and indices of values: fill()
    yield "root", hostile(BROADCAST, 1, (root, lowest))
    yield "codec", hostile(ALLREDUCE, 1, (codec, more_than_a_byte))
    yield "topology", hostile(ALLREDUCE, 1, (topology, more_than_a_byte))
    yield "splits", hostile(BARRIER, splits=bytes([255, 2, 255]) + bytes(8) + b"\0")
    yield "many-splits", hostile(ALLREDUCE, 1, splits=bytes([255, 2, 0]) + bytes(8) + b"\xff")
    yield "many-ranks", hostile(ADD, splits=bytes([2, 0]) + bytes(8) + b"\xff")


def main():
    for name, inputs in {"post": posts(), "negotiation": [*negotiation(), *relayed(), *inline()],
                         "request": requests(), "codec": codecs()}.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(inputs):
            (folder / f"seed{i:02}").write_bytes(data)
    for corpus, found in {"negotiation": findings(), "post": refused()}.items():
        for name, data in found:
            (CORPUS / corpus / f"finding-{name}").write_bytes(data)


if __name__ == "__main__":
    main()
