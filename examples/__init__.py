"""Programs for users: quick starts, training, other libraries. README.md lists them."""
