"""Our docstrings as griffe reads them: it wants an empty line before every section."""
import re

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(r"\n(?=(?:Args|Returns|Raises|Yields)[^\n]*:)", "\n\n", obj.docstring.value)
