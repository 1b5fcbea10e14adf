"""These tests are for a machine with a GPU; on another one they are not collected (`tests/test_gpu_cases.py` is)."""

import os

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch and with other workers

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
