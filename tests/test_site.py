"""The documentation site: what stands beside its pages, and that its links are checked as a reader follows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import PAGES, ROOT
from docs.site import links, navigation

FIRST = "docs/index"


def test_every_page_stands_once_in_the_navigation() -> None:
    texts = {
        page.relative_to(ROOT).with_suffix("").as_posix(): page.read_text(encoding="utf-8") for page in PAGES
    }
    trees = "".join(navigation.trees(name, text, FIRST) for name, text in texts.items())
    shown = [line.removeprefix("/") for line in trees.splitlines() if line.startswith("/")]
    assert sorted([*shown, FIRST]) == sorted(texts)


def test_a_page_is_the_parent_of_those_in_its_folder() -> None:
    page = "# P\n\n- [One](p/one.md): it.\n- [Else](other.md)\n\n| [Two](p/two.md#part) |\n"
    assert "/docs/p/one\n" in navigation.trees("docs/p", page, FIRST)
    assert "other" not in navigation.trees("docs/p", page, FIRST)
    assert ":caption: Here" in navigation.trees(FIRST, "## Here\n\n- [P](p.md)\n", FIRST)


GOOD = '<h1 id="top">t</h1><a href="#top">t</a><a href="sub/b.html#here">b</a><a href="https://x.org">x</a>'


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ""),
        ('<a href="c.html">c</a>', "c.html leads to no file"),
        ('<a href="sub/b.html#there">b</a>', "sub/b.html#there leads to no such place"),
        ('<a href="#below">b</a>', "#below leads to no such place"),
        ('<img src="p.svg">', "p.svg leads to no file"),
        ('<script src="https://cdn.org/a.js"></script>', "asks cdn.org"),
        ('<link rel="stylesheet" href="//fonts.org/f.css">', "asks fonts.org"),
    ],
)
def test_a_link_to_nothing_and_a_page_that_asks_others_are_found(
    tmp_path: Path, more: str, said: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(GOOD + more)
    (tmp_path / "sub" / "b.html").write_text('<p id="here"><a href="../a.html#top">a</a>')
    found = links.faults(tmp_path)
    assert [said in line for line in found] == [True] * bool(said)


@pytest.mark.extended
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(tmp_path / "trees"),
        "-c",
        "docs",
    ]
    built = subprocess.run(
        [*command, ".", str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    assert (built.returncode, built.stderr) == (0, "")
    assert links.faults(tmp_path / "html") == []
    index = (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
    assert all(f'"{page.relative_to(ROOT).with_suffix("").as_posix()}"' in index for page in PAGES)


def test_the_page_of_public_names_has_each_once() -> None:
    import mpitrain
    from docs.api import groups
    from docs.site.reference import with_docstrings

    page = with_docstrings((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))
    told = re.findall(r"^\.\. auto(?:class|function):: mpitrain\.(\w+)$", page, re.MULTILINE)
    assert (
        sorted(told) == sorted(mpitrain.__all__)
        and [name for names in groups().values() for name in names] == told
    )
    assert page.count("```{eval-rst}") == len(groups())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("counted in `unit`s, see `a`.", r"counted in `unit`\ s, see `a`."),
        ("2 * N and |x| of `a * b`, x_ too", r"2 \* N and \|x\| of `a * b`, x\_ too"),
        ("some_name stays, as does `a", "some_name stays, as does `a"),
    ],
)
def test_text_of_a_docstring_is_no_markup(line: str, said: str) -> None:
    from docs.site.reference import as_rst

    assert as_rst(line) == said
