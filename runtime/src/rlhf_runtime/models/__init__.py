"""The models of a run: their devices, their calls, and the weights that are sent between them."""
