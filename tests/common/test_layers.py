"""The layers of the Python package: imports point down only, without cycles of files or folders.

Imports are read from the source, also those inside functions, as are module names in strings (for importlib or another
interpreter). The layers are those of the picture in docs/architecture.md.
"""
import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bagua_hvd"

PAGE = PACKAGE.parent / "docs" / "architecture.md"


def drawn():
    """The picture's layers from the bottom, down to where C begins: lists of folders, or files."""
    picture = PAGE.read_text().split("```text")[1].partition("```")[0].partition("   |")[0]
    return [re.match(r" ([\w, ]+?)  ", line)[1].split(", ") for line in reversed(picture.strip("\n").splitlines())]


# A file may import from its own layer and from lower ones.
LAYERS = drawn()
ROOF = "bagua_hvd"                  # the package itself: its version, and run() of the launcher


def layer_of(module):
    part = module.split(".")[1] if "." in module else ROOF
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None), part


def modules():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def imports(module):
    """The modules of bagua_hvd that a module imports anywhere, or names in a string that is not a sentence."""
    path = MODULES[module]
    tree = ast.parse(path.read_text())
    prose = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in prose and re.fullmatch(r"bagua_hvd(\.\w+)+", str(node.value)):
            names = [node.value]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("bagua_hvd._native"):
                continue                # the core itself, below all layers
            while name.startswith(ROOF):
                if name in MODULES:
                    if name != module:
                        yield name
                    break
                name = name.rpartition(".")[0]


GRAPH = {module: set(imports(module)) for module in MODULES}


def circles(graph):
    """The strongly connected components of more than one node, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_every_module_has_a_floor():
    assert [module for module in MODULES if module != ROOF and layer_of(module)[0] is None] == []


def test_every_floor_is_there_once():
    parts = {layer_of(module)[1] for module in MODULES} - {ROOF}
    assert sorted(part for layer in LAYERS for part in layer) == sorted(parts)


def test_no_import_points_up():
    up = [
        f"{module} -> {other}" for module in MODULES for other in GRAPH[module]
        if module != ROOF and other != ROOF and layer_of(other)[0] > layer_of(module)[0]
    ]
    assert sorted(up) == []


def test_no_circle_of_files():
    assert circles(GRAPH) == []


def test_no_circle_of_folders():
    graph = {}
    for module, others in GRAPH.items():
        if module != ROOF:
            graph.setdefault(layer_of(module)[1], set()).update(layer_of(other)[1] for other in others if other != ROOF)
    assert circles(graph) == []


def only_leads_on(module):
    """Whether the file has only a docstring and imports, as an alias path."""
    body = ast.parse(MODULES[module].read_text()).body[1:]
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


# The runner itself also uses what is defined there: hosts and their slots, the config file, deadlines.
HOROVODS = [module for module in MODULES if module.startswith(f"{ROOF}.common")
            or module.startswith(f"{ROOF}.runner.common.util.") and only_leads_on(module)]


def test_horovods_paths_that_lead_elsewhere():
    assert [module for module in HOROVODS if not only_leads_on(module)] == [f"{ROOF}.common", f"{ROOF}.common.util"]
    assert {module.rpartition(".")[2] for module in HOROVODS if ".runner." in module} == {"env", "host_hash", "secret"}


@pytest.mark.parametrize("module", HOROVODS)
def test_nothing_imports_horovods_paths(module):
    assert [other for other in MODULES if module in GRAPH[other] and not other.startswith(f"{ROOF}.common")] == []
