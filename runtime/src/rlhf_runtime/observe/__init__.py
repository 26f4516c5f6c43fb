"""What a run shows: metrics of samples, the progress display, the timeline."""
