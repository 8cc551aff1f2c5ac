"""A hook of mkdocs: what a forge renders and Python-Markdown does not.

Links to files outside ``docs`` become names of these files, because the site has the pages alone. A
bar inside code in a table loses its backslash, which only a forge needs. Long names in tables may
break between their parts, so that columns stay narrow.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
PART = re.compile(r"(?<=[_/.:(\[])(?=\w)|(?<=[a-z])(?=[A-Z])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page before it is rendered; mkdocs calls it."""
    text = OUTSIDE.sub(r"\1 (`\2`)", markdown)
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)


def on_page_content(html: str, **_: Any) -> str:
    """The page after it is rendered; mkdocs calls it."""

    def cells(table: re.Match[str]) -> str:
        return NAME.sub(lambda name: PART.sub("<wbr>", name[0]), table[0])

    return TABLE.sub(cells, html)
