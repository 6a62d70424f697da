"""The first import of this package: says in one sentence what is missing, before anything else can fail."""

MINIMUM_VERSION = (2, 16)
_NEEDED = f"bagua_hvd.tensorflow needs TensorFlow {'.'.join(map(str, MINIMUM_VERSION))} or later"

try:
    import tensorflow
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(f"{_NEEDED}, and none is installed: run `pip install tensorflow`") from None

if tuple(int(part) for part in tensorflow.__version__.split(".")[:2]) < MINIMUM_VERSION:
    raise ImportError(
        f"{_NEEDED}, but {tensorflow.__version__} is installed: run `pip install --upgrade tensorflow`"
    )
