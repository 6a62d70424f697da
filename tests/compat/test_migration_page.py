"""docs/migrating-from-horovod.md is correct for every name and every variable."""
import re
from pathlib import Path

import horovod_api
import migration_page
import pytest

from bagua_hvd.core.variables import TABLE

PACKAGE = Path(__file__).parents[2] / "bagua_hvd"
STATUSES = {"set", "no effect", "not supported"}
VARIABLES = migration_page.variables()


def _mentions(variable, files):
    return [file for file in files if re.search(rf"""["']{variable}["']""", file.read_text())]


def _is_read(variable):
    """Whether it has an effect, by the table (checked by tests/common/test_variables.py) or as an engine's variable."""
    if variable in TABLE:
        return TABLE[variable].setter in ("user", "baguarun")
    return bool(_mentions(variable, [PACKAGE / "job" / "environment.py", PACKAGE / "job" / "engines.py"]))


def test_absent_names_are_rare_ones_of_the_table():
    rare = {f"{place}.{row.split('(')[0]}" for tier, place, row in horovod_api.rows() if tier == "C"}
    assert set(migration_page.absent_names()) <= rare
    assert all(len(cells) == 2 and cells[1] for cells in migration_page.table_rows("Names that are not there"))


@pytest.mark.parametrize("variable", horovod_api.VARIABLES)
def test_variable(variable):
    status = VARIABLES.get(variable)
    assert status is None or status in STATUSES
    assert (status is None) == _is_read(variable)
    if status == "set":
        assert _mentions(variable, (PACKAGE / "runner").rglob("*.py"))


def test_variables_of_the_build():
    assert all(variable in migration_page.section("Environment variables") for variable in horovod_api.BUILD_VARIABLES)


def test_no_variable_is_ours_or_invented():
    assert VARIABLES.keys() <= set(horovod_api.VARIABLES)


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", migration_page.PAGE.read_text()):
        assert (migration_page.PAGE.parent / target).exists(), target
