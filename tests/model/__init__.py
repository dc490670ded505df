"""A model of a queue, and actors that drive the real one beside it."""
