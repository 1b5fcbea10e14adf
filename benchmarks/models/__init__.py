"""`python -m benchmarks models`: whole training steps of models, by frontend."""
