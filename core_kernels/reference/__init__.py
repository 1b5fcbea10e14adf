"""Whole functions by definition, made of the ops' definitions: what a frontend's function is compared with."""
