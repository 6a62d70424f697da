"""Our docstrings as griffe reads them, and defaults as a reader would write them."""
import re

import griffe

SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)


def one_for_each(found):
    """Of "name, process_set: text" an entry for each name: griffe takes both for one name, without a default."""
    indent, names, text = found.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


def readable(default):
    """ProcessSet(process_set_id=0, ...) is global_process_set; <class 'a.b.C'> and <function f at 0x7f> are names."""
    if default.startswith("ProcessSet(process_set_id=0"):
        return "global_process_set"
    if codec := re.match(r"Codec\(name='(\w+)'", default):
        return codec[1]
    found = re.match(r"<(?:class '|function )?([\w.<>]+?)(?:'| at 0x\w+| object at 0x\w+)>$", default)
    return found[1].rpartition(".")[2] if found else default


class Sections(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = re.sub(r"\n(?=(?:Args|Returns|Raises|Yields)[^\n]*:)", "\n\n", obj.docstring.value)
            obj.docstring.value = SHARED.sub(one_for_each, text) if "Args:" in text else text

    def on_function(self, *, func, **_):
        for parameter in func.parameters:
            if isinstance(parameter.default, str):
                parameter.default = readable(parameter.default)
