"""Without a GPU, pytest does not collect these tests; `tests/test_gpu_cases.py` runs their cases on a CPU."""

import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch and other workers
sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks/: timers and large cases

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
