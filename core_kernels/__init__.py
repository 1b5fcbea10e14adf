"""Kernels and their launches, described once for every framework. Nothing here imports torch or jax."""
