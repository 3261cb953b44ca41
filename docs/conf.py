# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings; `make docs` builds with warnings as errors."""

import torch_sm3

project = "torch_sm3"
author = "torch_sm3 contributors"
copyright = "torch_sm3 contributors"
release = torch_sm3.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "figures/README.md"]
html_theme = "furo"
html_title = f"torch_sm3 {release}"

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Examples in pages are run by tests/python/test_examples_in_docs.py.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Named tuples document each field by themselves, too.
napoleon_use_ivar = True
# "Shape" is the one section that torch's docstrings have and napoleon does not know.
napoleon_custom_sections = ["Shape"]
