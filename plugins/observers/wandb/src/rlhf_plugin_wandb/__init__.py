"""Observer: Weights & Biases."""
