"""How a figure is timed, stored, compared with its bar, and printed."""
