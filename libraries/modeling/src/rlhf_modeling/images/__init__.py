"""Image-text models: how they are loaded, which of their modules read images, and what a micro-batch with images passes
to them."""
