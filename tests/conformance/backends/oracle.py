"""The definitions themselves: a check of the suite and of a new case, without kernels."""

from mxep.core_kernels.conformance.definitions import DEFINITIONS

from . import KERNEL_OPS

OPS = {name: DEFINITIONS[name] for name in KERNEL_OPS}
