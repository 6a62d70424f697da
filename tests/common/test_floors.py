"""The floors of the Python side: imports point down only, and there is no circle, neither of files nor of folders.

Read from the source, imports inside functions included. The picture in docs/architecture.md is this list.
"""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bagua_hvd"

# From the ground up: a file imports from its own floor and from those before it. Folders of bagua_hvd, or files.
FLOORS = [
    ["core"],
    ["job"],
    ["collectives"],
    ["codecs", "training"],
    ["primitives"],
    ["algorithms"],
    ["reduction"],
    ["data"],
    ["torch"],
    ["_keras"],
    ["tensorflow"],
    ["keras"],
    ["lightning"],
    ["as_horovod"],
    ["runner"],
    ["bench"],
    ["ray", "spark"],
    ["mxnet"],                      # says that there is nothing
    ["common"],                     # Horovod's paths, for others
]
ROOF = "bagua_hvd"                  # the package itself: its version, and run() of the launcher


def floor_of(module):
    part = module.split(".")[1] if "." in module else ROOF
    return next((i for i, floor in enumerate(FLOORS) if part in floor), None), part


def modules():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module):
    """What of bagua_hvd the module imports, wherever in the file."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("bagua_hvd._native"):
                continue                # the core itself, below all floors
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
    assert [module for module in MODULES if module != ROOF and floor_of(module)[0] is None] == []


def test_no_import_points_up():
    up = [
        f"{module} -> {other}" for module in MODULES for other in GRAPH[module]
        if module != ROOF and other != ROOF and floor_of(other)[0] > floor_of(module)[0]
    ]
    assert sorted(up) == []


def test_no_circle_of_files():
    assert circles(GRAPH) == []


def test_no_circle_of_folders():
    graph = {}
    for module, others in GRAPH.items():
        if module != ROOF:
            graph.setdefault(floor_of(module)[1], set()).update(floor_of(other)[1] for other in others if other != ROOF)
    assert circles(graph) == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(f"{ROOF}.common")])
def test_nothing_imports_horovods_paths(module):
    assert [other for other in MODULES if module in GRAPH[other] and not other.startswith(f"{ROOF}.common")] == []
