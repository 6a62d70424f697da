"""The benchmark of the codecs runs, for every codec; its figures are the machine's."""
import subprocess
import sys

from bagua_hvd.bench.codecs import CODECS


def test_every_codec_has_its_line():
    command = [sys.executable, "-m", "bagua_hvd.bench.codecs", "--mib", "1", "--rounds", "1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0].partition("/")[0] for line in lines[2:]] == [codec.name for codec in CODECS]
    assert all(float(figure.rstrip("%")) > 0 for line in lines[2:] for figure in line.split()[1:])
