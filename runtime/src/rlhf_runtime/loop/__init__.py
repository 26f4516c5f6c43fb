"""The training loop: one page for online runs, one for offline runs, and what they share."""
