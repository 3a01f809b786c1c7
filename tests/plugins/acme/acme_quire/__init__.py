"""An example of a package that adds one plugin of each kind to Quire."""
