"""What runs in an actor's process, and what travels between it and the driver."""
