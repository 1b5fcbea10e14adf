"""Adds the repository's root to sys.path: the examples are scripts outside the package."""
