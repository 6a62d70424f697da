"""The folders of native/ are layers: a file includes and calls only its own layer and those below.

docs/decisions/engine.md says why.
"""
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import native_programs

NATIVE = Path(__file__).resolve().parents[2] / "native"
# From the lowest layer up. The public header depends on none.
LAYERS = ["include", "base", "kernel", "transport", "executor", "collective", "primitive", "device", "gpu",
          "core/message", "core/telemetry", "core/context", "core/negotiation", "core/health", "core/engine",
          "core/api", "simulation"]
# Loaded by TensorFlow, so it cannot reach the engine. It may include the public header, and headers of base that need
# no C file.
LIBRARIES = ["tensorflow"]
SHARED_WITH_LIBRARIES = ["include", "base"]
HEADER = "bagua_hvd.h"


def layer_of(path):
    """The layer of a file, by its path within native/."""
    path = str(path)
    return next((layer for layer in [*LAYERS, *LIBRARIES] if path.startswith(layer + "/")), path.partition("/")[0])


def includes(path):
    """(line, name) of every `#include "name"`."""
    return [(number, found[1]) for number, line in enumerate(path.read_text().splitlines(), 1)
            if (found := re.match(r'\s*#\s*include\s+"([^"]+)"', line))]


def all_includes():
    """(the including file's folder, the included file's folder, a description for the report)"""
    for path in sorted(NATIVE.rglob("*")):
        if path.suffix not in (".c", ".h", ".cu", ".cuh"):
            continue
        for number, name in includes(path):
            folder = "include" if name == HEADER else layer_of(name)
            yield layer_of(path.relative_to(NATIVE)), folder, f"{path.relative_to(NATIVE)}:{number} includes {name}"


def complaint(folder, included):
    """Why a file in `folder` may not include a file in `included`; None: it may."""
    if folder == included or (folder in LIBRARIES and included in SHARED_WITH_LIBRARIES):
        return None
    if folder in LIBRARIES or included in LIBRARIES:
        return "a library of its own shares what needs no linking: the public header and base"
    if included not in LAYERS:
        return "it is in no layer"
    return None if LAYERS.index(included) < LAYERS.index(folder) else "includes point down only"


def test_every_folder_is_known():
    assert {layer_of(path.relative_to(NATIVE)) for path in NATIVE.rglob("*.[ch]*")} == {*LAYERS, *LIBRARIES}


def test_every_include_names_an_existing_file():
    """Names include the folder, which shows the layer: "../" and bare names would hide it."""
    missing = [(path, name) for path in NATIVE.rglob("*.[ch]*") for _, name in includes(path)
               if name != HEADER and not (NATIVE / name).is_file()]
    assert not missing


def test_includes_point_down():
    found = list(all_includes())
    assert len(found) > 300         # the search works
    wrong = [f"{what}: {why}" for folder, included, what in found if (why := complaint(folder, included))]
    assert not wrong, "\n".join(wrong)


def module_of(path):
    """A .c file and its header form one module."""
    return str(Path(path).with_suffix(""))


def test_no_cycles_between_modules():
    """This includes cycles within a layer: each module can be read after those that it includes."""
    graph = {}
    for path in sorted(NATIVE.rglob("*.[ch]*")):
        module = module_of(path.relative_to(NATIVE))
        graph.setdefault(module, set()).update(module_of(name) for _, name in includes(path) if name != HEADER)
    graph = {module: below - {module} for module, below in graph.items()}
    assert len(graph) > 100
    while leaves := [module for module, below in graph.items() if not below & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, "in, or above, a cycle: " + ", ".join(sorted(graph))


@pytest.mark.timeout(900)       # the first test of a configuration compiles the core
@pytest.mark.skipif(not native_programs.COMPILER[0] or not shutil.which("nm"), reason="needs a C compiler and nm")
def test_calls_point_down():
    """Includes do not show all calls: the public header declares functions that only the top layer defines."""
    archive, errors = native_programs.core("asan")       # compiled by test_native
    assert not errors, errors
    folder = archive.parent / "native"
    defined, used = {}, []
    for path in sorted(folder.rglob("*.o")):
        layer = layer_of(path.relative_to(folder))
        if not (NATIVE / path.relative_to(folder)).with_suffix(".c").exists():
            continue                # the object of a deleted file
        listing = subprocess.run(["nm", "--extern-only", path], capture_output=True, text=True, check=True).stdout
        for kind, name in re.findall(r"\b([A-Z]) (\S+)$", listing, re.MULTILINE):
            if kind == "U":
                used.append((layer, name, path.name))
            else:
                defined[name] = layer
    assert len(defined) > 300
    wrong = [f"{layer}/{file} uses {name} of {defined[name]}: {why}" for layer, name, file in used
             if name in defined and (why := complaint(layer, defined[name]))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder, included, may", [
    ("core/api", "executor", True), ("core/api", "core/context", True), ("core/message", "core/context", False),
    ("executor", "transport", True), ("executor", "executor", True), ("base", "include", True),
    ("executor", "collective", False), ("device", "gpu", False), ("kernel", "transport", False),
    ("include", "base", False),
    ("tensorflow", "include", True), ("tensorflow", "transport", False), ("core/api", "tensorflow", False),
    ("core/api", "elsewhere", False),
])
def test_complaints(folder, included, may):
    assert (complaint(folder, included) is None) is may
