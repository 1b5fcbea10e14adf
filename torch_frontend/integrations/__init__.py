"""Other libraries: torchao, transformers, torchtitan."""
