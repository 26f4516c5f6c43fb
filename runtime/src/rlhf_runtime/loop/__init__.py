"""The training loop: one module for online runs, one for offline runs, and shared modules."""
