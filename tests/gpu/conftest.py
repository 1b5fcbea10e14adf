"""Without a GPU, pytest does not collect these tests; `tests/frontends/test_gpu_cases.py` runs their cases on a CPU."""

import os

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch and other workers
# A test may leave a captured graph in a reference cycle. Freed during the capture of a later test, it breaks that off.
torch.compiler.config.force_cudagraph_gc = True

collect_ignore_glob = [] if torch.cuda.is_available() else ["*test_*.py"]
