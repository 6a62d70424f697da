"""Codecs rotated1 to rotated4 in NumPy, from the equations of native/kernel/rotated.h.

    y = H (d x) / D     s = sqrt(mean y^2)     q = number of thresholds T s below |y|     t = sum y^2 / sum |y| L[q]
    z = sign(y) L[q] t                         x' = d (H z)

Levels and thresholds are computed independently. Bytes: a header of 32 with the key, t of each block, codes.
"""
import math

import numpy as np

from codec_random import words

F = np.float32
LARGEST = F(2.0**100)


def lloyd_max(bits):
    """(levels, thresholds) for the magnitude of a standard normal."""
    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    levels = [(k + 0.5) * 2.5 / 2 ** (bits - 1) for k in range(2 ** (bits - 1))]
    for _ in range(5000):
        ends = [0.0, *((a + b) / 2 for a, b in zip(levels[:-1], levels[1:], strict=True)), 40.0]
        levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return np.array(levels, F), np.array(ends[1:-1], F)


LEVELS = {bits: lloyd_max(bits) for bits in (1, 2, 3, 4)}


def blocks(count, size):
    """(begin, D) of each block."""
    for begin in range(0, count, size):
        left = count - begin
        yield begin, size if left >= size else max(256, 1 << (left - 1).bit_length())


def coefficients(count, size):
    return sum(d for _, d in blocks(count, size))


def encoded_size(bits, count, size):
    return 32 + -(-4 * len(list(blocks(count, size))) // 32) * 32 + coefficients(count, size) * bits // 8


def signs(key, begin, d):
    bits = np.unpackbits(words(key, np.arange(begin // 32, (begin + d) // 32)).view(np.uint8), bitorder="little")
    return np.where(bits == 1, F(-1), F(1))


def hadamard(a):
    h = 1
    while h < a.size:
        pairs = a.reshape(-1, 2, h)
        a = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        h *= 2
    return a


def summed(terms):
    """64 partial sums, in rising order, then pairwise by halves."""
    sums = np.zeros(64, F)
    for row in terms.reshape(-1, 64):
        sums = sums + row
    while sums.size > 1:
        sums = sums[:sums.size // 2] + sums[sums.size // 2:]
    return sums[0]


def quantize(a, bits, unit):
    """(t, numbers) of coefficients a / unit."""
    levels, thresholds = LEVELS[bits]
    squares = summed(a * a)
    if not 2.0**-80 <= squares <= 2.0**100:
        largest = np.abs(a).max()
        if largest == 0 or not np.isfinite(largest):
            return F(0) if largest == 0 else F(np.nan), np.zeros(a.size, np.uint8)
        factor = 2.0 ** (1 - math.frexp(largest)[1])
        a, unit = (a * np.float64(factor)).astype(F), unit * factor
        squares = summed(a * a)
    s = np.sqrt(squares / F(a.size))
    q = (np.abs(a)[:, None] > thresholds * s).sum(1)
    t = np.float64(squares) / np.float64(summed(np.abs(a) * levels[q])) / unit
    return F(t) if t <= LARGEST else F(np.nan), (q | np.signbit(a) << (bits - 1)).astype(np.uint8)


def pack(numbers, b):
    """Packs b-bit numbers: element 16 k + j of a part in the bits from b k on of its 16-bit word j."""
    parts = numbers.astype(np.uint16).reshape(-1, 16 // b, 16)
    return np.bitwise_or.reduce(parts << (b * np.arange(16 // b, dtype=np.uint16))[:, None], axis=1).view(np.uint8)


def unpack(codes, b):
    parts = codes.reshape(-1, 32).view(np.uint16)
    return (parts[:, None, :] >> (b * np.arange(16 // b, dtype=np.uint16))[:, None] & (1 << b) - 1).reshape(-1)


def codes_of(numbers, bits):
    if bits != 3:
        return pack(numbers, bits).reshape(-1)
    units = numbers.reshape(-1, 256)
    return np.concatenate([np.concatenate([pack(unit & 3, 2).reshape(-1), pack(unit >> 2, 1).reshape(-1)])
                           for unit in units])


def numbers_of(codes, bits):
    if bits != 3:
        return unpack(codes, bits)
    return np.concatenate([unpack(unit[:64], 2) | unpack(unit[64:], 1) << 2 for unit in codes.reshape(-1, 96)])


def assembled(found, bits, key, count, size):
    """The code of blocks with these (t, numbers)."""
    code = np.zeros(encoded_size(bits, count, size), np.uint8)
    scales = np.array([t for t, _ in found], F)
    code[:8] = np.array([key], np.uint64).view(np.uint8)
    code[16], code[17] = 1, np.isnan(scales).any()
    code[32:32 + scales.nbytes] = scales.view(np.uint8)
    if count:
        codes = np.concatenate([codes_of(numbers, bits) for _, numbers in found])
        code[-codes.size:] = codes
    return code


def encode(x, bits, key, size=512):
    """The code of float32 elements."""
    found = []
    for begin, d in blocks(x.size, size):
        a = np.zeros(d, F)
        part = x[begin:begin + d]
        a[:part.size] = part
        found.append(quantize(hadamard(a * signs(key, begin, d)), bits, d))
    return assembled(found, bits, key, x.size, size)


def encode_coefficients(z, bits, key, count, size=512):
    found = [quantize(z[begin:begin + d], bits, 1) for begin, d in blocks(count, size)]
    return assembled(found, bits, key, count, size)


def key_of(code):
    return int(code[:8].view(np.uint64)[0])


def z_of(code, bits, count, size=512):
    """The coefficients; NaN in blocks with a t that is not finite."""
    levels, _ = LEVELS[bits]
    ends = list(blocks(count, size))
    scales = code[32:32 + 4 * len(ends)].view(F)
    codes = code[code.size - coefficients(count, size) * bits // 8:]
    z = np.zeros(coefficients(count, size), F)
    for (begin, d), t in zip(ends, scales, strict=True):
        numbers = numbers_of(codes[begin * bits // 8:(begin + d) * bits // 8], bits)
        magnitude = levels[numbers & (1 << (bits - 1)) - 1] * t
        z[begin:begin + d] = np.where(numbers >> (bits - 1), -magnitude, magnitude) if np.abs(t) <= LARGEST else np.nan
    return z


def inverse(z, key, count, size=512):
    """float32 elements; a block of zeros stays zero."""
    out = np.empty(count, F)
    for begin, d in blocks(count, size):
        part = z[begin:begin + d]
        x = hadamard(part) * signs(key, begin, d) if np.isfinite(part).all() else np.full(d, np.nan, F)
        out[begin:begin + d] = (x if part.any() else np.zeros(d, F))[:count - begin]
    return out


def decode(code, bits, count, size=512):
    return inverse(z_of(code, bits, count, size), key_of(code), count, size)
