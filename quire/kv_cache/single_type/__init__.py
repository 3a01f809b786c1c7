"""How layers of one kind use blocks. Managers of different kinds do not import one another."""
