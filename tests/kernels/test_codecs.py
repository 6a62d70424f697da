"""The Python class Codec."""
import numpy as np
import pytest

from bagua_hvd import codecs
from bagua_hvd.core import native

CODECS = [codecs.minmax_uint8, codecs.sign, codecs.sign_rms,
          codecs.float16, codecs.bfloat16, codecs.topk(), codecs.topk(0.25), codecs.float32, codecs.block(),
          codecs.block(4, stochastic=True), codecs.block(8, 512, stochastic=True), codecs.float8(128),
          codecs.topk(0.25, bits=2)]
BYTES = {"minmax_uint8": 32 + 1024, "sign": 32 + 128, "sign_rms": 32 + 128,
         "float16": 2000, "bfloat16": 2000, "float32": 4000, "block8": 32 + 32 + 1024, "block4": 32 + 32 + 512,
         "float8": 32 + 32 + 1024, "topk_2bit": 32 + 63 + 63 + 63}


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_round_trip(codec):
    x = np.random.default_rng(0).standard_normal((10, 100)).astype(np.float32)
    code = codec.encode(x, seed=3)
    assert code.dtype == np.uint8 and code.shape == (codec.encoded_size(native.FLOAT32, x.size),)
    assert code.size == BYTES.get(codec.name, 32 + 8 * int(1000 * codec.parameter))
    np.testing.assert_array_equal(code, codec.encode(x, seed=3))
    decoded = codec.decode(code, np.float32, x.size)
    assert decoded.dtype == np.float32 and decoded @ x.reshape(-1) > 0
    total = np.full(x.size, 2, np.float32)
    codec.decode_add(total, code, np.float32)
    np.testing.assert_array_equal(total, decoded + 2)


@pytest.mark.parametrize("codec", [codecs.block(stochastic=True),
                                   codecs.block(4, 64, stochastic=True)], ids=str)
def test_other_seeds_give_other_bytes(codec):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert (codec.encode(x, seed=3) != codec.encode(x, seed=4)).any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_dtypes(codec):
    floats = (native.FLOAT16, native.BFLOAT16, native.FLOAT32, native.FLOAT64)
    taken = [dtype for dtype in range(11) if codec.takes(dtype)]
    assert taken == ([native.FLOAT32] if codec is codecs.float32 else sorted(floats))
    with pytest.raises(ValueError, match=f"codec {codec.name} does not take dtype int32"):
        codec.encode(np.zeros(3, np.int32))


def test_refusals():
    for ratio in (0, -0.1, 1.01, float("nan"), "0.1", None):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            codecs.topk(ratio)
    with pytest.raises(ValueError, match=r"topk\(bits=4\): expected 2 or None"):
        codecs.topk(bits=4)
    for size in (0, 32, 96, 1024, 64.5):
        for make in (codecs.block, codecs.float8):
            with pytest.raises(ValueError, match="expected 64, 128, 256 or 512"):
                make(size=size)
    with pytest.raises(ValueError, match=r"block\(bits=2\): expected 8 or 4"):
        codecs.block(2)
    code = codecs.sign.encode(np.ones(100, np.float32))
    with pytest.raises(ValueError, match="257 elements encoded by sign are 96 bytes, not 64"):
        codecs.sign.decode(code, np.float32, 257)
    for sentence, call in {
        "codec sign takes a NumPy array, not list": lambda: codecs.sign.encode([1.0]),
        "codec sign takes a NumPy array, not bytes": lambda: codecs.sign.decode(bytes(code), np.float32, 100),
        "count='100': expected an integer": lambda: codecs.sign.decode(code, np.float32, "100"),
        "codec sign takes a NumPy array, not NoneType": lambda: codecs.sign.decode_add(None, code, np.float32),
        "seed=0.5: expected an integer": lambda: codecs.minmax_uint8.encode(np.ones(100, np.float32), 0.5),
    }.items():
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(ValueError, match="seed=-1: expected 0 <= seed < 2.64"):
        codecs.minmax_uint8.encode(np.ones(100, np.float32), -1)
    with pytest.raises(ValueError, match="codec sign decodes a contiguous array"):
        codecs.sign.decode(np.stack([code, code], 1)[:, 0], np.float32, 100)
    code[16] = 99
    with pytest.raises(ValueError, match="not bytes that codec sign has encoded"):
        codecs.sign.decode(code, np.float32, 100)
    with pytest.raises(ValueError, match="a contiguous float32 array"):
        codecs.sign.decode_add(np.zeros(100), code, np.float32)
    with pytest.raises(ValueError, match="does not take dtype >f4: convert"):
        codecs.minmax_uint8.decode(codecs.minmax_uint8.encode(np.ones(8, np.float32)), ">f4", 8)


def test_the_other_byte_order():
    values = np.linspace(-1, 1, 50, dtype=np.float32)
    for codec in CODECS:
        np.testing.assert_array_equal(codec.encode(values.astype(">f4")), codec.encode(values))
