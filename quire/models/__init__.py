"""Model families, and the reading of model directories."""
