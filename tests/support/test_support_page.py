"""docs/support.md says what the tests run."""

from __future__ import annotations

from running import REPOSITORY
from support.page import support_page


def test_the_page_in_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == support_page(), "make reference"
