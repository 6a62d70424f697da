"""The secret with which the processes of one job authenticate each other."""
import base64
import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # name of its environment variable
_NBYTES = 32


def make_secret_key() -> bytes:
    """A new secret: 32 random bytes, as base64 bytes that an environment variable can hold."""
    return base64.b64encode(secrets.token_bytes(_NBYTES))
