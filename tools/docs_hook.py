"""A hook of mkdocs: links to files outside ``docs`` become names of these files.

The site has the pages alone; on a forge the same links lead to the sources.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page before it is rendered; mkdocs calls it."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
