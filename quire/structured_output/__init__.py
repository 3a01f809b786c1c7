"""Output that has the form a request demands: grammars, the libraries that make them, and who keeps them."""
