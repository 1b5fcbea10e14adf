"""Without a GPU, pytest does not collect these tests; `tests/frontends/test_gpu_cases.py` runs their cases on a CPU."""

import os

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch and other workers
# A captured graph that an earlier test left in a cycle is freed before the next capture, which its end would break off.
torch.compiler.config.force_cudagraph_gc = True

collect_ignore_glob = [] if torch.cuda.is_available() else ["*test_*.py"]
