"""The Ray cluster: connection, and reservation of its devices."""
