"""Sphinx configuration."""  # noqa: INP001 - Sphinx reads it by path

project = "gpuwarden"
copyright = "the gpuwarden authors"  # noqa: A001
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
suppress_warnings = ["misc.highlighting_failure"]  # PromQL with placeholders
html_theme = "furo"
html_title = "gpuwarden"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
