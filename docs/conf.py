"""The documentation site: `make site` builds it from the pages as they lie in the repository.

The source folder is the repository, so a link from a page leads to the same file on a forge and on the site. Nothing
is taken from the network, neither while it is built nor while it is read.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mpitrain  # noqa: E402
from docs.pages import PAGES  # noqa: E402

project = "mpitrain"
release = version = mpitrain.__version__
html_title = f"mpitrain {release}"
copyright = "its authors"
root_doc = "docs/index"
include_patterns = [page.relative_to(ROOT).as_posix() for page in PAGES]
exclude_patterns = [
    "build",
    "data",
    "dist",
    "docs/_build",
    "runs",
    ".venv*",
    ".git",
    ".*_cache",
    "**/__pycache__",
]

extensions = [
    "myst_parser",
    "docs.site.drawings",
    "docs.site.navigation",
    "docs.site.reference",
    "docs.site.sources",
]
myst_heading_anchors = 6
highlight_language = "text"
default_role = "code"  # what docstrings put between single backticks
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False
html_use_index = False
templates_path = ["site/templates"]
