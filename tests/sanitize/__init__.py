"""The C++ ops under AddressSanitizer and UndefinedBehaviorSanitizer, called with numpy arrays: `make sanitize`.

    sanitize.sh    builds the extension with both sanitizers in build/sanitize, then runs:
        seeded.py      two wrong calls, which must end the process: the sanitizers work
        run_cases.py   every case of every op, edge shapes, broken ends and maps
        tests/kernels/cpp, with torch and jax; the others are without
        fuzz_ops.py    random calls; draws.py draws them. CI runs a few with the ordinary build: test_fuzz_ops.py

`python -m tests.sanitize EXTENSION MODULE ARGUMENTS` runs a module with another build of the extension.
"""
