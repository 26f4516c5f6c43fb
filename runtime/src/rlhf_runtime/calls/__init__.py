"""Calls of plugin code, each with a deadline: worker processes, threads and the event loop."""
