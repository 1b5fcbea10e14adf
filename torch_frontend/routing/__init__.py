"""The router, the order of tokens by expert, and their weighted sum."""
