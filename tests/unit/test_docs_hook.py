"""``tools/docs_hook.py``: pages as the site shows them."""

from __future__ import annotations

import re

import docs_hook


def test_files_outside_are_named_and_bars_in_code_of_tables_lose_their_backslash() -> None:
    text = "See [the demo](../demo/run.py), [here](tune.md).\n\n| `a\\|b` | c\\|d |\n\n`a\\|b`\n"
    assert docs_hook.on_page_markdown(text) == (
        "See the demo (`demo/run.py`), [here](tune.md).\n\n| `a|b` | c\\|d |\n\n`a\\|b`\n"
    )


def test_names_in_tables_may_break_between_their_parts_and_keep_their_text() -> None:
    cell = "<code>tests/a.py::test_b</code> UcmStore <code>UcmStore &lt;A&gt;(b[c])</code>"
    html = f"<p><code>a_b</code></p><table><td>{cell}</td></table>"
    made = docs_hook.on_page_content(html)
    assert made.startswith("<p><code>a_b</code></p>")
    assert re.findall(r"(?:[\w.:/;&()[\]]|<wbr>)+(?=</code>)", made.partition("<table>")[2]) == [
        "tests/<wbr>a.<wbr>py::<wbr>test_<wbr>b",
        "&lt;A&gt;(<wbr>b[<wbr>c])",
    ]
    assert "<code>Ucm<wbr>Store" in made
    assert ">UcmStore" not in made
    assert made.replace("<wbr>", "") == html
