"""The seeded faults: at least one per op family, language and frontend. `run.py` applies them one at a time."""

from .fault import Fault
from .frontends import FRONTENDS
from .kernels import KERNELS

FAULTS: tuple[Fault, ...] = KERNELS + FRONTENDS
