"""Image-text models: how to load them, which of their modules read images, and the inputs of a micro-batch with
images."""
