"""Definitions of whole functions, built from the ops' definitions: tests compare the frontends with them."""
