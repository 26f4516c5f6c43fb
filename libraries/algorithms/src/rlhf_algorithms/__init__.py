"""Base classes of algorithms: policy gradient and learning from pairs."""
