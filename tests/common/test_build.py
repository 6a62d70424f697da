"""Messages and contents of builds. `make wheels` builds and checks whole wheels."""
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from bagua_hvd import __version__
from bagua_hvd._native import ffi, lib

ROOT = Path(__file__).resolve().parents[2]


def features_of_proc():
    """The CPU features in /proc/cpuinfo, under the names of bhvd_cpu_features."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    if not words >= {"avx2", "f16c", "fma"}:
        return "scalar"
    return "avx512" if words >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"} else "avx2"


def test_the_features_of_the_cpu_are_those_that_linux_reports():
    assert ffi.string(lib.bhvd_cpu_features()).decode() == features_of_proc()


def test_the_version_is_the_same_wherever_it_stands():
    assert ffi.string(lib.bhvd_version()).decode() == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n  version: {__version__}\n" in (ROOT / ".ci" / "conda" / "recipe.yaml").read_text()
    changelog = (ROOT / "docs" / "changelog.md").read_text()
    assert re.search(r"^## (\S+),", changelog, re.MULTILINE)[1] == __version__


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_build_says_on_which_systems_it_runs(platform):
    done = subprocess.run([sys.executable, "-c",
                           f"import runpy, setuptools, sys; sys.platform = {platform!r}; runpy.run_path('setup.py')"],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"bagua_hvd runs on Linux; this is {platform}. "), done.stderr


def test_the_sdist_holds_what_wheels_are_made_of(tmp_path):
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path,
                    "sdist", "--dist-dir", tmp_path], cwd=ROOT, check=True, timeout=100)
    archive, = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    build = runpy.run_path(str(ROOT / "build.py"))
    needed = {"build.py", "setup.py", "pyproject.toml", "LICENSE", "README.md", *build["HEADERS"],
              *build["TENSORFLOW_OPS"]["sources"], "native/device/kernels.cu",
              *(path for paths in build["SOURCES"].values() for path in paths),
              *(str(path.relative_to(ROOT)) for path in (ROOT / "bagua_hvd").rglob("*.py"))}
    assert not needed - names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    assert not [name for name in names if name.startswith("docs/results/records/")]


def test_types_of_the_native_module_are_the_headers():
    """The stub for mypy is generated from the header and is part of the wheel."""
    build = runpy.run_path(str(ROOT / "build.py"))
    text = build["stub"]()
    assert (ROOT / build["STUB"]).read_text() == text, "build again"
    assert set(re.findall(r"^    (BHVD_\w+): ", text, re.MULTILINE)) | set(re.findall(r"def (bhvd_\w+)", text)) == {
        name for name in dir(lib) if not name.startswith("bhvd_python_")}
    assert "def bhvd_wait(self, handle: Pointer, timeout_ms: int, error: Pointer, /) -> int" in text
    assert all(getattr(lib, name) == int(value) for name, value in re.findall(r"(BHVD_\w+): Final = (\d+)", text))


def test_extras_are_for_users():
    """Published requirements are not pinned; development tools are a group; Python 3.14 has no TensorFlow."""
    about = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    extras = about["project"]["optional-dependencies"]
    assert not [package for packages in extras.values() for package in packages if "==" in package]
    assert not extras.keys() & about["dependency-groups"].keys()
    pins = [package for package in about["dependency-groups"]["dev"] if str(package).startswith("tensorflow")]
    assert [package.partition(";")[2].strip() for package in pins] == ["python_version < '3.14'"]


def test_conda_installs_what_pip_does():
    about = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text())

    def names(requirements):
        return sorted(re.match(r"[\w-]+", requirement)[0] for requirement in requirements)

    assert names(recipe["requirements"]["run"]) == sorted([*names(about["project"]["dependencies"]), "python"])
    assert names(recipe["requirements"]["host"]) == sorted(
        [*names(about["build-system"]["requires"]), "pip", "python", "python-abi3"])
    (name, target), = about["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {target}"]


def test_the_index_of_torch_is_for_torch_alone():
    """Else a package of the same name on that index would be installed unnoticed."""
    printed = subprocess.run(["make", "-n", "-W", "pyproject.toml", ".venv/built", "TORCH_INDEX=there"], cwd=ROOT,
                             check=True, capture_output=True, text=True, timeout=60).stdout
    lines = [line for line in printed.splitlines() if "there" in line]
    assert [line.partition("--index-url ")[2] for line in lines] == ["there torch==2.13.0"]


def test_documented_commands_run_the_package_that_builds():
    """build.py hides the package `build` from `python -m build` in this folder."""
    patterns = "*.md", ".github/**/*.*", ".ci/*", "docs/**/*.md", "Makefile"
    pages = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    hidden = [str(page) for page in pages if re.search(r"python[\d.]* -m build\b", page.read_text())]
    assert not hidden, "write `python -P -m build`"


def test_the_hidden_package_is_named_where_one_looks_for_it():
    done = subprocess.run([sys.executable, "-m", "build"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "write `python -P -m build`" in done.stderr, done.stderr


def test_what_is_installed_for_development_has_one_version_for_each_python():
    about = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    constraints = (ROOT / ".ci" / "constraints.txt").read_text()
    names = {re.sub("[-_.]+", "-", re.match(r"[\w.-]+", package)[0]).lower()
             for packages in about["dependency-groups"].values() for package in packages if isinstance(package, str)}
    assert not names - set(re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE)), "make constraints"
    assert "://" not in constraints


def test_the_readme_links_what_is_there():
    text = (ROOT / "README.md").read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    files = [link for link in links if not link.startswith(("https:", "../../actions/"))]
    assert len(files) > 15
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_readme_says_first_what_is_missing():
    first_screen = (ROOT / "README.md").read_text().partition("## Start")[0]
    assert "No package index has a release yet" in first_screen
    assert "tested with [one H200](docs/gpu.md), never with several" in first_screen


def test_a_release_gives_readme_and_metadata_its_address(tmp_path):
    tomllib = pytest.importorskip("tomllib")
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    address = "https://host.example/owner/name"
    subprocess.run([sys.executable, ROOT / ".ci" / "address", address, "v1.2.3"], cwd=tmp_path, check=True, timeout=60)
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert not [link for link in links if not link.startswith(f"{address}/")]
    assert {f"{address}/actions/workflows/tests.yml", f"{address}/actions/workflows/tests.yml/badge.svg",
            f"{address}/blob/v1.2.3/LICENSE", f"{address}/raw/v1.2.3/docs/time-to-quality.svg"} <= set(links)
    page = (tmp_path / "README.md").read_text()
    assert "pip install 'bagua_hvd[torch]' " in page and "in a clone: " in page
    assert "release yet" not in page and "pip install ." not in page and "pip install '." not in page
    about = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert about["project"]["urls"]["Homepage"] == address
    assert about["project"]["scripts"]


def test_notes_of_a_release_are_the_changelogs(tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / ".ci" / "notes").write_text((ROOT / ".ci" / "notes").read_text())
    (tmp_path / "docs" / "changelog.md").write_text(
        "# Changelog\n\n## 0.3.0, not yet released\n\n- c\n\n## 0.2.10, 2026-02-01\n\n- b\n\n"
        "## 0.2.1, 2026-01-01\n\n- a, [page](elastic.md#grow), [site](https://site.example/b.md)\n")

    def notes(version):
        done = subprocess.run(["bash", tmp_path / ".ci" / "notes", version, "https://host.example/owner/name"],
                              capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip()

    assert notes("0.2.1") == (0, "- a, [page](https://host.example/owner/name/blob/v0.2.1/docs/elastic.md#grow), "
                                 "[site](https://site.example/b.md)")
    assert notes("0.2.10") == (0, "- b")
    assert notes("0.3.0")[0] == notes("0.2")[0] == 1


def test_workflows_call_actions_by_commit():
    uses = [line for path in (ROOT / ".github" / "workflows").glob("*.yml") for line in path.read_text().splitlines()
            if "uses: " in line and "uses: ./" not in line]
    assert len(uses) > 20
    assert not [line for line in uses if not re.search(r"@[0-9a-f]{40}  # v\d", line)]
