"""`python -m bagua_hvd.as_horovod FOLDER` writes a wheel named horovod, whose modules and commands are bagua_hvd's.

    python -m bagua_hvd.as_horovod wheels && pip install wheels/horovod-*.whl

For code, images and clusters that cannot be edited: once it is installed, `import horovod.X` gives bagua_hvd.X in every
Python of the environment, `horovodrun` is baguarun, and importlib.metadata.version("horovod") works. It replaces a real
Horovod like any other version. It is on no package index; do not upload it to a public one: the name belongs to
Horovod.
"""
import argparse
import base64
import hashlib
import zipfile
from pathlib import Path

from bagua_hvd import as_horovod
from bagua_hvd.core.version import __version__

# The part after + is ours: requirements such as "horovod==0.28.1" accept it.
VERSION = f"{as_horovod.VERSION}+bagua.hvd.{__version__}"
_DIST_INFO = f"horovod-{VERSION}.dist-info"
_DATE = (1980, 1, 1, 0, 0, 0)       # zip's first date, so that the wheel is always the same

_FILES = {
    "horovod/__init__.py": '''\
"""This horovod is bagua_hvd; see bagua_hvd.as_horovod."""
import sys

del sys.modules["horovod"]      # this module: what is imported now takes its place

import bagua_hvd.as_horovod  # noqa: E402

sys.modules["horovod"] = bagua_hvd
''',
    f"{_DIST_INFO}/METADATA": f"""\
Metadata-Version: 2.1
Name: horovod
Version: {VERSION}
Summary: Not Horovod: makes bagua_hvd answer to its name, as module and as command
License: Apache-2.0
Requires-Dist: bagua_hvd
""",
    f"{_DIST_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: bagua_hvd\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_DIST_INFO}/entry_points.txt": "[console_scripts]\nhorovodrun = bagua_hvd.runner.launch:run_commandline\n",
    f"{_DIST_INFO}/top_level.txt": "horovod\n",
}


def write_wheel(folder: Path) -> Path:
    """Writes the wheel into the folder, which is created if missing; returns its path. OSError: that is impossible."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-{VERSION}-py3-none-any.whl"
    record = ""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in _FILES.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text.encode())}\n"
            _add(wheel, name, text)
        _add(wheel, f"{_DIST_INFO}/RECORD", record + f"{_DIST_INFO}/RECORD,,\n")
    return path


def _add(wheel, name, text):
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = 0o644 << 16
    wheel.writestr(entry, text, zipfile.ZIP_DEFLATED)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.as_horovod",
                                     description="Writes a wheel by which bagua_hvd answers to the name horovod.")
    parser.add_argument("folder", type=Path, help="where to write it")
    try:
        path = write_wheel(parser.parse_args().folder)
    except OSError as error:
        parser.error(f"the wheel cannot be written: {error}")
    print(f"{path}\nOn every host of the job: pip install --no-deps '{path}'")


if __name__ == "__main__":
    main()
