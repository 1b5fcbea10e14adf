"""MXFP8 for Mixture-of-Experts training: `mxep.torch_frontend` and `mxep.jax_frontend`."""

from importlib.metadata import version

__version__ = version("mxep")
