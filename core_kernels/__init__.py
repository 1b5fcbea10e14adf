"""Kernels and their launches, described once for every framework. Imports neither torch nor jax."""
