"""The weighted sum of a token's expert rows, and its gradient."""
