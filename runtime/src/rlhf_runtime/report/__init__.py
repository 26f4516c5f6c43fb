"""Reads the records in a run's folder, and writes the page that shows them."""
