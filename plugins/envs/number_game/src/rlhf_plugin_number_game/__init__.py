"""Environment: find a hidden number by asking questions."""
