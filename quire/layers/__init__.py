"""The parts that decoder models are made of. Each owns its parameters; none knows which model it is in."""
