"""Hashed cases. A module, but for `layers`, has `cases() -> {name: Case}`; jobs.py lists them."""
