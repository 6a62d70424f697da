"""What `make docs` does beyond mkdocs: pages with commands are run, equations become MathML, pictures part of the page.

In a page that has a code block with a title, such a block is a file of that name. A block of the language `console`,
unless a comment before it says why not, is run, line by line after `$ `, in a folder with these files, and is shown
with what it printed. A command that fails ends the build. A picture that a command made there is shown where the page
has an image without a folder in its name. SVGs become part of the page, so that they have its colours. In a page of
reference/, `::: module *` is every public name of the module, the usual ones first; Ray and Spark need not be installed
for that. Equations are written as GitHub shows them: blocks of the language `math`, and $`...`$ within a line.
"(decision 9)" becomes a link.
"""
import functools
import html
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

BLOCK = re.compile(r'(?P<reason>^<!-- not run: [^\n]* -->\n+)?'
                   r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.(?:svg|png))\)")
SVG = re.compile(r"^!\[(?P<text>[^\]]*)\]\((?P<name>[\w./-]+\.svg)\)$", re.MULTILINE)
EQUATION = re.compile(r"^```math\n(?P<block>.*?)^```$|\$`(?P<inline>[^`]+)`\$", re.MULTILINE | re.DOTALL)
DECISION = re.compile(r"(?<!\[)\bdecision (\d+)\b(?!\])")
# In the reference these come first, in this order.
USUAL = ("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
         "DistributedOptimizer", "DistributedGradientTape", "broadcast_parameters", "broadcast_optimizer_state",
         "broadcast_variables", "broadcast_global_variables", "load_model", "broadcast_object", "allreduce",
         "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "SyncBatchNorm",
         "SyncBatchNormalization", "consensus", "statistics", "Compression", "run", "TorchState",
         "TensorFlowKerasState", "KerasState", "ElasticSampler", "add_process_set", "remove_process_set",
         "ProcessSet", "Auto", "GradientAllReduce", "ByteGrad", "Rotated", "PowerSGD", "OneBitAdam", "DiLoCo",
         "Async")
SECONDS = 300       # for one command
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0",
               "MATPLOTLIBRC": str(Path(__file__).parent / "matplotlibrc")}


class Anything(type):
    """Of classes that take every argument, and have every attribute: another of them."""
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *_, **__: None})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What is imported of packages that are not installed: modules of such classes, while this is in use."""

    def __init__(self, packages):
        self.absent = {name for name in packages if importlib.util.find_spec(name) is None}

    def __enter__(self):
        sys.meta_path.append(self)

    def __exit__(self, *_):
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.partition(".")[0] in self.absent]:
            del sys.modules[name]

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(getattr, Anything(spec.name, (), {}))
        return module

    def exec_module(self, module):
        pass


def on_startup(**_):
    """The reference reads docstrings from modules, and these need what is gigabytes."""
    with StandIns(["ray", "pyspark", "pyarrow", "pandas"]):
        for name in ("ray.train", "spark.common.store", "spark.torch", "spark.keras", "spark.lightning"):
            importlib.import_module(f"bagua_hvd.{name}")


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"^::: (\S+) \*$", lambda all_of: "\n".join(
            f"::: {path}" for path in public_names(all_of[1])), markdown, flags=re.MULTILINE)
    if any(block["title"] for block in BLOCK.finditer(markdown)):
        markdown = run_page(markdown, page, config, files)
    markdown = with_pictures(markdown, Path(config["docs_dir"], page.file.src_uri).parent)
    return DECISION.sub(lambda named: link(named, page, config), EQUATION.sub(mathml, markdown))


@functools.cache
def decisions(folder):
    """{number: page}, by headings such as "## 6, 38. Title"."""
    return {number: path.name for path in Path(folder, "decisions").glob("*.md")
            for numbers in re.findall(r"^##? ([\d, ]+)\. ", path.read_text(), re.MULTILINE)
            for number in map(int, numbers.split(","))}


def link(named, page, config):
    """The words as a link to the page that has the decision of that number, which there must be."""
    uri = f"decisions/{decisions(config['docs_dir'])[int(named[1])]}"
    return f"[{named[0]}]({os.path.relpath(uri, Path(page.file.src_uri).parent)})"


def run_page(markdown, page, config, files):
    with tempfile.TemporaryDirectory() as folder:
        shown = BLOCK.sub(lambda block: executed(block, Path(folder)), markdown)
        for name in IMAGE.findall(markdown):
            made = Path(folder, name)
            if made.exists() and made.suffix != ".svg":
                uri = f"{page.file.src_uri.rpartition('/')[0]}/{name}".lstrip("/")
                files.append(File.generated(config, uri, content=made.read_bytes()))
        return with_pictures(shown, Path(folder))


def executed(block, folder):
    if block["title"]:
        (folder / block["title"]).write_text(block["text"])
    if block["language"] != "console" or block["reason"]:
        return block[0]
    shown = []
    for command in re.findall(r"^\$ (.*)$", block["text"], re.MULTILINE):
        environment = {**os.environ, **ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}")
        shown += [f"$ {command}", done.stdout.strip("\n").replace(f"{folder}/", "").replace(f"{ROOT}/", "")]
    return "```console\n" + "\n".join(filter(None, shown)) + "\n```"


def with_pictures(markdown, folder):
    """The SVGs of this folder become part of the page; what is not there stays a link, and so an error of the build."""
    def shown(image):
        path = folder / image["name"]
        return inlined(path.read_text(), image["text"]) if path.exists() else image[0]

    return SVG.sub(shown, markdown)


def inlined(svg, text):
    """A picture as part of the page: grey becomes the colour of its text."""
    svg = svg[svg.index("<svg"):].replace("#76808a", "currentColor").replace("<svg ", f'<svg aria-label="{text}" ', 1)
    return f'<figure class="picture">{re.sub(r"<style>@media.*?</style>", "", svg)}</figure>\n'.replace("\n\n", "\n")


def mathml(equation):
    """The equation as MathML, which browsers show by themselves."""
    if equation["inline"]:
        # In something else: Markdown takes a line that begins with <math> for a paragraph of its own.
        return f'<span>{convert(html.unescape(equation["inline"]))}</span>'
    return f'<div class="equation">{convert(equation["block"].strip(), display="block")}</div>'


def public_names(module):
    """Where griffe finds those that the module offers: its own, and what it takes from other modules of the package."""
    offered = {name: value for name, value in vars(importlib.import_module(module)).items()
               if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
               and value.__module__.startswith("bagua_hvd") and "<locals>" not in value.__qualname__}
    usual = {name: place for place, name in enumerate(USUAL)}
    # By itself the name would be that of a module, if there is one beside it.
    return [f"{offered[name].__module__ if f'{module}.{name}' in sys.modules else module}.{name}"
            for name in sorted(offered, key=lambda name: (usual.get(name, len(usual)), name.lower()))]
