"""Whole functions by definition, composed of the definitions of the ops; the frontends are compared with them."""
