"""What runs in each of an engine's workers: loading weights and checking them."""
