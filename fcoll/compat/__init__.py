"""Drop-in replacements for older libraries, each in a module of its own, imported by its name."""
