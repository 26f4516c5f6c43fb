"""Observer: TensorBoard."""
