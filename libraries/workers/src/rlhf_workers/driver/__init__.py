"""Workers as the driver sees them: calling them, watching them, and reporting their failures."""
