"""How the candidates of one prompt are made: a method is a function of a `Session`."""
