"""Sphinx configuration of the site: `make docs` builds it."""  # noqa: INP001 - Sphinx reads it by path

project = "gpuwarden"
copyright = "the gpuwarden authors"  # noqa: A001 - the name that Sphinx reads
extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors that the remediator serves, by GitHub's rule
myst_enable_extensions = ["strikethrough"]
suppress_warnings = ["misc.highlighting_failure"]  # PromQL with placeholders
html_theme = "furo"
html_title = "gpuwarden"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
