"""These tests are for a machine with a GPU; on another one they are not collected (`tests/test_gpu_cases.py` is)."""

import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch and with other workers
sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/, for its clocks and its large cases

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
