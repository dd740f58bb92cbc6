"""The code in docs/ runs as it stands there, page by page."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.usefixtures("compile_cache")

PAGES = sorted((pathlib.Path(__file__).parents[1] / "docs").glob("*.md"))


def code_of(page: pathlib.Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page):
    names = {"__name__": "docs"}
    exec(compile(code_of(page), str(page), "exec"), names)
    if page.name == "models.md":
        for result in (names["result"], names["linen_result"]):
            assert result.eval_metrics["loss"] < 1.0, "the targets have a variance of about 14"
