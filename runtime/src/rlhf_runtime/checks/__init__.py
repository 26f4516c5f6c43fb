"""What is refused before a run starts, by topic, and the order in which it is checked."""
