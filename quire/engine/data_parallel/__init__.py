"""Data parallelism: several engine cores, each with the whole model, behind one front-end."""
