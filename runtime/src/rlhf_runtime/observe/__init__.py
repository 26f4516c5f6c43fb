"""Output about a run: metrics of samples, the progress display, the timeline."""
