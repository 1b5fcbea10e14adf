"""One op each."""
