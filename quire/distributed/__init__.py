"""How processes that share a model communicate."""
