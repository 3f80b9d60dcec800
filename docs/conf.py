"""Sphinx's settings."""

from importlib.metadata import version as version_of

project = "fcoll"
version = release = version_of("fcoll")
extensions = ["myst_nb"]
nb_execution_mode = "off"
html_theme = "furo"
html_title = f"fcoll {release}"
exclude_patterns = ["_build"]
