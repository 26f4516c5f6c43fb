"""The data of a run: sources, rows, templates, and the order in which rows are taken."""
