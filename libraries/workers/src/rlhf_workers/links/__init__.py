"""Links that carry weights from the processes of a trainer to the processes of a generator."""
