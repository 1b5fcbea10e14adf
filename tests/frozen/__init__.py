"""Hashes of every output and of all machine code: stored in this folder, found again after a change, compared.

    python -m tests.frozen --compare                        this tree against the stored hashes       make frozen
    python -m tests.frozen --compare --against COMMIT       this tree against a commit, on this machine
    python -m tests.frozen --write                          store the hashes of this tree             make freeze

| record | hashed data | the hashes hold for |
| --- | --- | --- |
| `cpu` | outputs of the ops whose bytes are defined, through PyTorch and JAX | every machine |
| `cpu_products` | on a CPU: grouped products, MoE layers, layers on two ranks | versions of the frameworks, the CPU |
| `gpu` | outputs of all ops, and the four layers of the benchmark | versions, architecture and size of the GPU |
| `sass` | instructions and resources of the CUDA kernels in the extension | version of nvcc |
| `ptx` | PTX of the Triton kernels for Hopper and Blackwell | version of Triton |

A record is a JSON file: for what its hashes hold, and by case the hashes of the inputs and of each output. A case has
one line for both frontends, or for all architectures. Hashes that hold for another machine are not compared. The cases
are taken from the tests and the benchmark: tests/gpu/cases.py, tests/conformance/layer/layers.py,
tests/routed_layers.py, tests/kernels/cross_compile/test_cross_compile.py, benchmarks/cases/shapes.py.

    __main__.py --> jobs.py --processes--> worker.py: a module of sources/
                       '--> records.py --> equal | what differs
"""
