"""How layers of one kind use pages. Managers of different kinds do not import one another."""
