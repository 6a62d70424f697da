"""The first import of a front end: says in one sentence what is missing, before anything else can fail."""
import importlib
import re


def require(framework: str, minimum: tuple[int, int]) -> None:
    """Imports the framework of a front end.

    Args:
        framework: its name; in lower case also the name of its module, its pip package and the front end.
    Raises:
        ImportError: it is not installed, or older than `minimum`.
    """
    module = framework.lower()
    needed = f"bagua_hvd.{module} needs {framework} {minimum[0]}.{minimum[1]} or later"
    try:
        version = importlib.import_module(module).__version__
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{needed}, and none is installed: run `pip install {module}`") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < minimum:
        raise ImportError(f"{needed}, but {version} is installed: run `pip install --upgrade {module}`")
