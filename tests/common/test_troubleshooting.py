"""The code contains the messages that docs/troubleshooting.md quotes."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SENTENCES = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def code():
    """All text of the code, with continued string literals joined."""
    files = [ROOT / "build.py", *(ROOT / "bagua_hvd").rglob("*.py"), *(ROOT / "native").rglob("*.c")]
    return "".join(re.sub(r'" *\n *f?"', "", file.read_text()) for file in files)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_is_said(sentence, code):
    assert sentence in code
