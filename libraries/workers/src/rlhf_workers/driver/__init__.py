"""The driver's side of workers: calls, monitoring and reports of failures."""
