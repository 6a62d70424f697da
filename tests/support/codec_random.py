"""The random numbers of the stochastic codecs, from the equations in native/kernel/codec.h."""
import numpy as np


def words(seed, w):
    """x of the words w (below 2^32): uint32."""
    modulus = 1 << 64
    z = (seed + 0x9E3779B97F4A7C15) % modulus
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % modulus
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % modulus
    z ^= z >> 31
    a, b = np.uint32(z % (1 << 32)), np.uint32(z >> 32)
    x = w.astype(np.uint32) ^ a
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> np.uint32(15) ^ b) * np.uint32(0x735A2D97)
    return x ^ x >> np.uint32(15)


def uniform(seed, count):
    """u of the elements 0 .. count - 1, count <= 2^32: float32, odd multiples of 2^-17."""
    i = np.arange(count, dtype=np.uint32)
    x = words(seed, i // 32 * 16 + i % 16)
    halves = np.where(i % 32 < 16, x % (1 << 16), x >> np.uint32(16))
    return (2 * halves + 1).astype(np.float32) * np.float32(2.0**-17)
