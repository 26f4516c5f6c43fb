"""Work with the parts of a run that trains nothing."""
