"""A locale with a decimal comma, as toolkits such as Qt set it for the whole process."""
import locale
import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "de_DE.UTF-8"


def make_german(folder):
    """The environment that use_german() needs."""
    if not shutil.which("localedef") or not Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("no German locale can be made here")
    subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", folder / NAME], check=True)
    return {"LOCPATH": str(folder)}


def use_german():
    """Sets the locale, as such a toolkit does."""
    locale.setlocale(locale.LC_ALL, NAME)
    assert locale.localeconv()["decimal_point"] == ","
