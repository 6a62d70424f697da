"""TensorFlow's dtypes and the core's."""
import tensorflow as tf

from bagua_hvd.core import native

DTYPES = {
    tf.uint8: native.UINT8,
    tf.int8: native.INT8,
    tf.uint16: native.UINT16,
    tf.int16: native.INT16,
    tf.int32: native.INT32,
    tf.int64: native.INT64,
    tf.float16: native.FLOAT16,
    tf.float32: native.FLOAT32,
    tf.float64: native.FLOAT64,
    tf.bool: native.BOOL,
    tf.bfloat16: native.BFLOAT16,
}


def native_dtype(dtype):
    """The core's number for a tf.DType. ValueError: it has none."""
    try:
        return DTYPES[tf.as_dtype(dtype)]
    except KeyError:
        raise ValueError(f"Tensor type {dtype} is not supported.") from None
